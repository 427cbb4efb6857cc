"""First contact with GPUs runs in parts that a later call continues, and its parts are right on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness.bench import BENCHES
from harness.bench.figures import BenchReport, Figure
from harness.bench.gpu import parts, training
from harness.bench.gpu.agreement import measure_attention
from harness.bench.gpu.environment import SIZES
from harness.bench.gpu.parts import PARTS, bench_gpu
from harness.bench.gpu.training import add_trace, hidden_share, kind_of, measure_packed
from harness.bench.workspace import Workspace
from harness.errors import ConfigError, HarnessError

CPU = {"device": "cpu", "gpus": [], "driver": "", "engine": "", "engine_missing": "there is no GPU", "torch": "2.11"}
H100 = CPU | {"device": "cuda", "gpus": ["NVIDIA H100 80GB HBM3, 85.0 GB"], "driver": "580"}


class Machine:
    """Answers for the processes of parts: describes a machine, and measures or fails."""

    def __init__(self, monkeypatch, machine=CPU, fails=()):
        self.machine, self.fails, self.begun = dict(machine), fails, []
        monkeypatch.setattr(parts, "measure_apart", self.run)

    def run(self, place, name, *arguments, ranks=1, limit_s, log=None):
        if place.endswith(":describe_gpus"):
            return self.machine
        self.begun.append((name, ranks))
        if name in self.fails:
            raise HarnessError("HarnessError: out of luck", where="there", fix="try again")
        report = BenchReport("gpu")
        report.add(Figure("speed", 2.0, "x", at_most=3.0))
        return report.to_dict()


def bench(tmp_path, **settings):
    with Workspace(tmp_path) as workspace:
        return bench_gpu(BENCHES["gpu"].sizes(out=str(tmp_path / "out"), **settings), workspace, lambda text: None)


def test_parts_that_are_measured_are_not_measured_again_and_failed_ones_are(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, fails=("step-8b",))
    report = bench(tmp_path)
    everything = [name for name, _ in machine.begun]
    assert report.failed == ["step-8b"]
    assert "step-8b failed: HarnessError: out of luck" in report.notes
    machine.begun.clear()
    machine.fails = ()
    report = bench(tmp_path)
    assert [name for name, _ in machine.begun] == ["step-8b"]
    assert report.failed == []
    assert {figure.name for figure in report.figures} == {f"{name}: speed" for name in everything}


def test_what_the_machine_lacks_is_reported_and_the_rest_runs(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, H100 | {"engine_missing": "No module named 'transformer_engine'"})
    report = bench(tmp_path)
    ran = dict(machine.begun)
    assert set(PARTS) - set(ran) == {
        *("links", "layouts-2", "layouts-4", "layouts-8"),
        *("attention-flash", "attention-fused", "attention-unfused", "fusions"),
    }
    assert set(ran.values()) == {1}
    assert "layouts-2 missing: requires 2 GPUs, but has 1" in report.notes
    missing = "Transformer Engine cannot be used: No module named 'transformer_engine'"
    assert f"attention-flash missing: {missing}" in report.notes
    page = (tmp_path / "out" / "report.md").read_text()
    assert "NVIDIA H100" in page
    assert "requires 8 GPUs" in page


def test_parts_on_all_gpus_have_a_rank_a_gpu(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, H100 | {"gpus": H100["gpus"] * 8, "engine": "2.20", "engine_missing": ""})
    bench(tmp_path)
    ran = dict(machine.begun)
    assert set(ran) == set(PARTS)
    assert (ran["step-8b"], ran["links"], ran["layouts-4"]) == (8, 8, 4)
    assert (ran["packed-1b"], ran["packed-8b"]) == (1, 1)


def test_files_of_another_machine_or_size_are_refused_by_name(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    bench(tmp_path, parts=("environment",))
    with pytest.raises(ConfigError, match=r"size full, .*; this call: size tiny"):
        bench(tmp_path, parts=("environment",), size="tiny")
    machine.machine = dict(H100)
    with pytest.raises(ConfigError, match=r"full, device cpu, .*; this call: size full, device cuda"):
        bench(tmp_path, parts=("environment",))


def test_a_damaged_file_of_a_part_is_measured_again(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    bench(tmp_path, parts=("environment",))
    path = tmp_path / "out" / "environment.json"
    whole = path.read_text()
    part = json.loads(whole)
    del part["size"]
    broken = [whole[:100], json.dumps(part), whole.replace('"host": ', '"host": 1, "was": ')]
    broken += [
        whole.replace('"seconds": ', '"seconds": [], "was": '),
        whole.replace('"value": ', '"value": "x", "unit": '),
    ]
    for text in broken:
        path.write_text(text)
        bench(tmp_path, parts=("environment",))
    assert machine.begun == [("environment", 1)] * (1 + len(broken))


def test_a_limit_leaves_parts_to_the_next_call(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    report = bench(tmp_path, total_limit_s=1e-9)
    assert machine.begun == []
    assert f"{next(iter(PARTS))} was not started within total_limit_s: run again to continue" in report.notes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matrices"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>", "norms"),
        ("void multi_tensor_apply_kernel<AdamFunctorMaster>", "optimizer"),
        ("aten::addmm", "matrices"),
        ("aten::pin_memory", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kind_of(name) == kind


def event(name, start, duration, cat="cpu_op", tid=1):
    return {"name": name, "ts": start, "dur": duration, "cat": cat, "tid": tid, "ph": "X"}


def test_a_trace_of_a_gpu_says_what_waits_and_what_is_hidden():
    kernels = [event("gemm", 0, 40, "kernel", 7), event("gemm", 60, 20, "kernel", 7)]
    copies = [
        event("Memcpy HtoD (Pinned -> Device)", 30, 20, "gpu_memcpy", 9),
        event("Memcpy HtoD (Pageable -> Device)", 70, 10, "gpu_memcpy", 8),
    ]
    assert hidden_share(copies, kernels) == pytest.approx(20 / 30)
    report = BenchReport("gpu")
    waits = [event("cudaStreamSynchronize", 80, 5, "cuda_runtime"), event("cudaLaunchKernel", 0, 5, "cuda_runtime")]
    add_trace(report, [*kernels, *copies, *waits], {"aten::mm": 50.0}, steps=2)
    values = {figure.name: figure.value for figure in report.figures}
    assert values["device idle"] == pytest.approx(10 / 80)
    assert values["waits of the host for the device, a step"] == 0.5
    assert values["of them from memory that is not pinned"] == 0.5
    assert values["time in matrices"] == pytest.approx(60 / 90)
    assert values["time of copies to the device under kernels"] == pytest.approx(20 / 30)


def test_attention_is_compared_with_plain_attention_and_with_a_wrong_mask(tmp_path):
    with Workspace(tmp_path) as workspace:
        report = measure_attention(replace(SIZES["tiny"], device="cpu"), workspace, "torch")
    assert [figure.name for figure in report.missed] == []
    figures = {figure.name: figure.value for figure in report.figures}
    over = "bfloat16, with padding: error of gradients over plain attention's"
    assert figures[f"{over}, bounds dropped"] > 10 > figures[over]
    assert figures["isolation: findings"] == 0


def test_packed_chats_are_compared_with_as_much_dense_work(tmp_path, monkeypatch):
    done = []

    def step(step, rows, seq_length, device, *, updates):
        tokens = [row.tokens.shape for row in rows]
        done.append((tokens, updates))
        return 1.0

    monkeypatch.setattr(training, "bare_step", step)
    with Workspace(tmp_path) as workspace:
        report = measure_packed(replace(SIZES["tiny"], device="cpu", rounds=1), workspace, "8b")
    assert not any(updates for _, updates in done)
    # The packed row and the one dense sequence have one shape.
    (_, tokens), (count, length) = sorted({tuple(shape) for (shape,), _ in done})
    assert tokens - count < count * length <= tokens
    note = next(note for note in report.notes if "dense sequences of" in note)
    assert f"against {count} dense sequences of {length}" in note


def test_more_ranks_than_the_cores_of_this_machine_run_are_refused(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    with pytest.raises(ConfigError, match=r"5,000 processes on .* cores"):
        bench(tmp_path, ranks=5000, parts=("links",))
    assert machine.begun == []
