"""Megatron's indexed datasets (X.bin and X.idx) from token shards, without PyTorch and Megatron-Core.

    convert_tokens(["shards/"], "corpus")       token shards (Parquet) to one pair, as Megatron's own builder writes it
    write_family(["shards/"], OUT, family)      one pair per split, and the JSON files for Megatron's options
    merge_indexed(["a", "b"], "ab")             pairs joined end to end
    verify_indexed("ab")                        problems of a pair

Read `index` first: the layout of X.idx.
"""
