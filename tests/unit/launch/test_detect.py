"""The file of a cluster, proposed from the output of sinfo."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.config import compose_config
from harness.errors import ConfigError
from harness.launch.cluster import ClusterConfig, SubmitConfig
from harness.launch.detect import find_site, propose_cluster, read_partitions

SINFO = """\
cpu|2-00:00:00|64|128|515000|(null)|(null)
hopper|1-00:00:00|32|112|2063000+|gpu:h100:8(S:0-1)|ib,ndr
debug|infinite|2|112|2063000|gpu:h100:8|ib
mixed|4:00:00|4|72+|480000|gpu:4,shard:16|gb200
007|1:00:00|1|2|8000|(null)|(null)
"""


def composed(text: str, folder: Path) -> ClusterConfig:
    (folder / "cluster").mkdir()
    (folder / "cluster" / "mine.yaml").write_text(text)
    return compose_config("submit", SubmitConfig, ["cluster=mine"], config_dir=folder).cluster


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("", ("hopper", "1-00:00:00", 8, 8, 14, 80)),
        ("debug", ("debug", "24:00:00", 8, 8, 14, 80)),
        ("mixed", ("mixed", "4:00:00", 4, 4, 18, None)),
        ("cpu", ("cpu", "2-00:00:00", 0, 2, 64, None)),
        ("007", ("007", "1:00:00", 0, 2, 1, None)),
    ],
)
def test_a_cluster_is_proposed_that_submit_takes(tmp_path, partition, expected):
    text = propose_cluster(read_partitions(SINFO), partition)
    values = yaml.safe_load(text)
    names = ("partition", "time", "gpus_per_node", "ranks_per_node", "cpus_per_rank", "gpu_gib")
    assert tuple(values.get(name) for name in names) == expected
    assert composed(text, tmp_path).partition == expected[0]


def test_a_partition_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="there is no partition 'gpu'") as refused:
        propose_cluster(read_partitions(SINFO), "gpu")
    assert "cpu, hopper, debug, mixed, 007" in refused.value.fix


@pytest.mark.parametrize(
    ("files", "site"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws_p5"),
        ({"sys_vendor": "Google\n"}, "gcp_a3ultra"),
        ({"sys_vendor": "Microsoft Corporation\n"}, "azure_ndv5"),
        ({"sys_vendor": "QEMU\n", "chassis_asset_tag": "OracleCloud.com\n"}, "oci_h100"),
        ({"sys_vendor": "Dell Inc.\n"}, ""),
        ({}, ""),
    ],
)
def test_a_cloud_is_known_by_its_firmware(tmp_path, files, site):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_site(tmp_path) == site


@pytest.mark.parametrize(
    ("partition", "site", "variable"),
    [
        ("hopper", "aws_p5", ("NCCL_NET", "AWS Libfabric")),
        ("hopper", "azure_ndv5", ("NCCL_TOPO_FILE", "/opt/microsoft/ndv5-topo.xml")),
        ("hopper", "oci_h100", ("NCCL_IB_TC", "41")),
        ("rdma", "", ("NCCL_IB_TC", "104")),
        ("mixed", "azure_ndv5", ("CUDA_DEVICE_MAX_CONNECTIONS", "32")),  # its GPUs are not those of that file
        ("cpu", "aws_p5", ("OMP_NUM_THREADS", "1")),
        ("hopper", "gcp_a3ultra", ("NCCL_NET", "gIB")),
        ("a3mega", "gcp_a3ultra", ("NCCL_NET", "FasTrak")),
        ("a3", "gcp_a3ultra", ("NCCL_NET", "GPUDirectTCPX_v7")),
        ("hopper", "", ("NVTE_FWD_LAYERNORM_SM_MARGIN", "16")),
    ],
)
def test_the_fabric_is_that_of_the_site_and_the_nodes_are_those_of_the_partition(tmp_path, partition, site, variable):
    more = "rdma|1:00:00|4|112|2063000|gpu:h100:8|h100,roce\n"
    more += "a3mega|1:00:00|4|208|1800000|gpu:h100:8|(null)\na3|1:00:00|4|208|1800000|gpu:h100:8|(null)\n"
    text = propose_cluster(read_partitions(SINFO + more), partition, site=site)
    cluster = composed(text, tmp_path)
    assert cluster.env[variable[0]] == variable[1]
    assert cluster.partition == partition
    assert cluster.ranks_per_node == {"mixed": 4, "cpu": 2}.get(partition, 8)


def test_gpus_are_counted_of_every_kind_and_of_parts_of_them():
    lines = ("gpu:8", "gpu:h100:4(S:0),gpu:a100:4(S:1)", "gpu:1g.10gb:7(S:0-1)", "gpu:nvidia_h100_80gb_hbm3:8,shard:16")
    found = read_partitions("".join(f"p|1:00:00|2|64|1000|{gres}|f\n" for gres in lines))
    kinds = [(8, ""), (8, "h100"), (7, "1g.10gb"), (8, "nvidia_h100_80gb_hbm3")]
    assert [(one.gpus, one.gpu) for one in found] == kinds
