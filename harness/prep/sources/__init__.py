"""Chat files: find those that a source names, cut them into shards, and read their records in a stream.

Read `finding` first (files on a disk, in a bucket, of the hub), then `reading`; `text` and `tables` know the kinds of
files. Nothing is imported here: the settings are part of every command line, which must not wait for pyarrow.
"""
