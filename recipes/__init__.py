"""Entry points: `python -m recipes.prepare`, `torchrun -m recipes.sft`, `torchrun -m recipes.pretrain`."""
