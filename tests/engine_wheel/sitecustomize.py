"""Give processes with this folder on PYTHONPATH the Transformer Engine of a wheel (`samples/engine_extension.py`)."""

import engine_extension  # noqa: F401
