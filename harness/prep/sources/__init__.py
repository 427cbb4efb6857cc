"""Find the chat files of a source, cut them into shards, and stream their records.

Read `finding` first (files on a disk, in a bucket, on the hub), then `reading`; `text` and `tables` read the kinds of
files. Nothing is imported here: the settings are part of every command line, which must not wait for pyarrow.
"""
