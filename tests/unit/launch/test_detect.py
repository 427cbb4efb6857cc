"""The file of a cluster, proposed from the output of sinfo."""

from __future__ import annotations

import pytest
import yaml

from harness.config import compose_config
from harness.errors import ConfigError
from harness.launch.cluster import SubmitConfig
from harness.launch.detect import propose_cluster, read_partitions

SINFO = """\
cpu|2-00:00:00|64|128|515000|(null)|(null)
hopper|1-00:00:00|32|112|2063000+|gpu:h100:8(S:0-1)|ib,ndr
debug|infinite|2|112|2063000|gpu:h100:8|ib
mixed|4:00:00|4|72+|480000|gpu:4,shard:16|gb200
"""


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("", ("hopper", "1-00:00:00", 8, 8, 14)),
        ("debug", ("debug", "24:00:00", 8, 8, 14)),
        ("mixed", ("mixed", "4:00:00", 4, 4, 18)),
        ("cpu", ("cpu", "2-00:00:00", 0, 2, 64)),
    ],
)
def test_a_cluster_is_proposed_that_submit_takes(tmp_path, partition, expected):
    text = propose_cluster(read_partitions(SINFO), partition)
    values = yaml.safe_load(text)
    names = ("partition", "time", "gpus_per_node", "ranks_per_node", "cpus_per_rank")
    assert tuple(values[name] for name in names) == expected
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(text)
    cluster = compose_config("submit", SubmitConfig, ["cluster=mine"], config_dir=tmp_path).cluster
    assert cluster.partition == expected[0]


def test_a_partition_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="there is no partition 'gpu'") as refused:
        propose_cluster(read_partitions(SINFO), "gpu")
    assert "cpu, hopper, debug, mixed" in refused.value.fix
