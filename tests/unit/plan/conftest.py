"""Plans are compared with what Megatron-Core allocates."""

from __future__ import annotations

import prepared  # noqa: F401
