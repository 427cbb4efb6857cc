"""Layouts of shards on disk, one module each, which `harness.formats.base.FORMATS` lists."""
