"""Export a checkpoint as a folder that serves: weights, settings of generation, tokenizer, chat template, model card.

Read `folder` first: it writes the folder. `data` finds what the run was trained on, and `card` writes the card.
"""
