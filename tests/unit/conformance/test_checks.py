"""Each check passes on a trainer without a fault, and fails on one with the fault that it is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plain_trainer import FAULTS, Trainer, WithoutRows
from torch.distributed.checkpoint.api import CheckpointException

from harness.conformance import CHECKS, ConformanceVerdict, TargetProcess, judge
from harness.conformance.kit import Failed, Kit, conversations, trained_pairs
from tests.samples.warm_python import warm_python

PLAIN = Path(__file__).parents[2] / "samples/plain_trainer.py"
ALONE = [name for name, check in CHECKS.items() if check.ranks == 1 and not check.after]
TOGETHER = [name for name in CHECKS if name not in ALONE]


def run(target: str, names: list[str], folder: Path) -> list[ConformanceVerdict]:
    return TargetProcess(target, folder, python=warm_python()).run(names, lambda verdict: None)


@pytest.mark.parametrize("name", ALONE)
def test_a_check_passes_without_a_fault_and_names_its_own(name, tmp_path) -> None:
    assert judge(Trainer(), name, tmp_path / "right")[0] == "PASS"
    outcome, text = judge(Trainer(FAULTS[name]), name, tmp_path / "wrong")
    assert outcome == "FAIL"
    assert text


@pytest.mark.submission
def test_checks_of_two_ranks_pass_without_a_fault(tmp_path) -> None:
    asked = {*TOGETHER, "resume-within-an-epoch"}  # which saves what two ranks continue
    assert {one.check: one.outcome for one in run(str(PLAIN), TOGETHER, tmp_path)} == dict.fromkeys(asked, "PASS")


@pytest.mark.nightly
@pytest.mark.parametrize("name", TOGETHER)
def test_a_check_of_two_ranks_names_its_fault(name, tmp_path) -> None:
    verdicts = {one.check: one for one in run(f"{PLAIN}:{name.replace('-', '_')}", [name], tmp_path)}
    verdict = verdicts[name]
    assert verdict.outcome == "FAIL", verdict.text


def test_a_check_of_two_ranks_on_one_is_not_judged_and_a_step_of_another_type_is_named(tmp_path) -> None:
    assert judge(Trainer(), "token-mean-over-ranks", tmp_path) == ("NOT SUPPORTED", "the check needs a job of 2 ranks")

    class RaisesAnything(Trainer):
        def build(self, model_folder, data, layout):
            raise CheckpointException("no plan", {1: (ValueError("no file"), None)})

    assert judge(RaisesAnything(), "padding-changes-nothing", tmp_path)[0] == "ERROR"

    class ReturnsLossAlone(Trainer):
        def build(self, model_folder, data, layout):
            return lambda batch: 2.0

    outcome, text = judge(ReturnsLossAlone(), "padding-changes-nothing", tmp_path)
    assert outcome == "ERROR"
    assert text.startswith("TypeError: the step returned 2.0 instead of a loss and a norm (None without one)")
    assert text.endswith("(--dir FOLDER keeps the traceback)")


def masked(ids, flags):
    return [token if flag >= 0 else -100 for token, flag in zip(ids, flags, strict=True)]


@pytest.mark.parametrize(
    ("mistake", "change"),
    [
        ("labels that are not shifted", lambda ids, labels: ([*ids, 0], [-100, *labels])),
        ("labels that are shifted twice", lambda ids, labels: (ids, [*labels[1:], -100])),
        ("a mask that is a token late", lambda ids, labels: (ids, masked(ids, [-100, *labels[:-1]]))),
        ("a mask that is a token early", lambda ids, labels: (ids, masked(ids, [*labels[1:], -100]))),
    ],
)
def test_a_misplaced_label_or_mask_is_named(mistake, change, tmp_path) -> None:
    class Misplaces(Trainer):
        def build(self, model_folder, data, layout):
            step = super().build(model_folder, data, layout)
            return lambda batch: step([dict(zip(one, change(*one.values()), strict=True)) for one in batch])

    for name in ("padding-changes-nothing", "packed-equals-unpacked"):
        outcome, text = judge(Misplaces(), name, tmp_path / name)
        assert outcome == "FAIL"
        assert f", which is {mistake}" in text


def test_another_divisor_is_named(tmp_path) -> None:
    class CountsPadding(Trainer):
        def build(self, model_folder, data, layout):
            step = super().build(model_folder, data, layout)
            return lambda batch: tuple(value / 4 for value in step(batch))

    outcome, text = judge(CountsPadding(), "padding-changes-nothing", tmp_path)
    assert outcome == "FAIL"
    assert ", both 0.25 times those expected: another divisor; expected" in text


def test_adapters_that_are_not_trained_alone_are_named(tmp_path) -> None:
    class TrainsAll(Trainer):
        def build(self, model_folder, data, layout):
            step = super().build(model_folder, data, layout)
            self._optimizer.add_param_group({"params": list(self._model.model.embed_tokens.parameters())})
            return step

    outcome, text = judge(TrainsAll(), "lora-equals-merged", tmp_path)
    assert outcome == "FAIL"
    assert text == "the merged weights have another model.embed_tokens than the base: not only adapters are trained"


def test_a_checkpoint_without_a_file_fails(tmp_path) -> None:
    class SavesNothing(Trainer):
        def save(self, folder):
            folder.mkdir()

    outcome, text = judge(SavesNothing(), "damaged-checkpoint-is-refused", tmp_path)
    assert (outcome, text) == ("FAIL", "the checkpoint has no file")


def test_a_gradient_of_a_known_mistake_is_named_where_the_reported_loss_is_right() -> None:
    with pytest.raises(Failed, match=r"norm 4\.00000, which is the gradient of a mean of means; expected"):
        object.__new__(Kit).compare((6.0, 4.0), (6.0, 5.0), {"a mean of means": (7.0, 4.0), "a sum": (9.0, 9.0)})


def test_every_check_is_explained_with_threads_and_has_a_fault() -> None:
    assert set(FAULTS) == set(CHECKS)
    for check in CHECKS.values():
        assert len(check.about) > 80, check.name
        assert check.threads
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in check.threads)
    data = conversations([30] * 40)
    pairs = trained_pairs([{**one, "labels": one["input_ids"]} for one in data])
    assert len(pairs) == len(set(pairs)) == 40 * 29
    assert all(one["labels"][-1] == one["input_ids"][-1] for one in data)
    assert data == conversations([30] * 40)


def test_a_target_without_optional_methods_answers_that_it_does_not_support_their_checks(tmp_path) -> None:
    outcomes = {name: judge(WithoutRows(), name, tmp_path / name) for name in ALONE}
    assert {name for name, (outcome, _) in outcomes.items() if outcome == "PASS"} == {
        "padding-changes-nothing",
        "token-mean-over-microbatches",
        "conversation-mean",
    }
    assert outcomes["packed-equals-unpacked"] == ("NOT SUPPORTED", "it does not pack")
    assert outcomes["evaluation-mean"] == ("NOT SUPPORTED", "the target has no method evaluate")
    assert {outcome for outcome, _ in outcomes.values()} == {"PASS", "NOT SUPPORTED"}


class NeverLoads(Trainer):
    def load(self, folder: Path) -> None:
        raise RuntimeError("checkpoint format 3 cannot be read")


class DoesNothing(Trainer):
    def build(self, model_folder, data, layout):
        super().build(model_folder, data, layout)
        return lambda batch: (3.0, 1.0)

    def evaluate(self, batch):
        return 3.0

    def rows(self, steps):
        return []

    def load(self, folder: Path) -> None:
        pass


class GivesNoNumbers(Trainer):
    def build(self, model_folder, data, layout):
        super().build(model_folder, data, layout)
        return lambda batch: (float("nan"), float("nan"))


class TrainsAgain(Trainer):
    """After a resume the last step is trained again."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._done -= 1


class TrainsEndsOfOthers(Trainer):
    """Of the end tokens, those of the system and the user are trained."""

    def render(self, records):
        made = super().render(records)
        for one in made:
            one["labels"] = [
                token if label == -100 and token == 257 else -100
                for token, label in zip(one["input_ids"], one["labels"], strict=True)
            ]
        return made


RESUMES = [name for name in ALONE if name.startswith("resume-")]


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        *((DoesNothing, name) for name in ALONE if not name.startswith(("assistant", "end-", "tool", "stock"))),
        *((GivesNoNumbers, name) for name in ALONE if name in ("attention-boundaries", "packed-equals-unpacked")),
        *((NeverLoads, name) for name in ["damaged-checkpoint-is-refused", *RESUMES]),
        *((TrainsAgain, name) for name in RESUMES if name != "resume-restores-the-optimizer"),
        (TrainsEndsOfOthers, "end-token-is-trained"),
    ],
)
def test_a_broken_trainer_passes_no_check_for_another_reason(trainer, name, tmp_path) -> None:
    outcome, text = judge(trainer(), name, tmp_path)
    assert outcome != "PASS", text
