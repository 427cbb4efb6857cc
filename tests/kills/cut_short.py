"""Cut a file to half of a page, as a copy over it that has just begun: `cut_short.py FILE`."""

import os
import sys

os.truncate(sys.argv[1], 2048)
