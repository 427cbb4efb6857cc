"""Export a checkpoint to a folder for serving: weights, generation settings, tokenizer, chat template, model card.

Read `folder` first: it writes the folder. `data` finds the run's training data, and `card` writes the card.
"""
