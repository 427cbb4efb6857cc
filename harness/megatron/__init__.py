"""Everything that touches torch.distributed, Megatron-Core or Transformer Engine."""

import warnings

# On import Megatron-Core warns a dozen times about optional packages (Apex, flash-attention) that nothing here needs.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
# Its checkpoints use parts of PyTorch that warn at each load, from wherever the call was made.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, message="Please use DTensor instead")
