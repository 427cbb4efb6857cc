"""Entry points: `python -m harness.recipes.prepare`, `torchrun -m harness.recipes.sft` and so on."""
