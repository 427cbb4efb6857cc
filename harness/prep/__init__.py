"""From chat data to a packed dataset; needs numpy and pyarrow only (tokenizers where text is tokenised)."""
