"""Training on data that is still being made: chunks in a folder, a producer that writes them, ranks that read them."""
