"""A request whose inputs the model could not read ends with an error; its sampled token never leaves the scheduler."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from qwen4_modules import runtime
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import batch_result_processor as processor_module
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

REASON = "rows of shard_3: errno 5"
BAD_TOKEN = 99


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Publish a configuration: requests and result processing read it."""
    import tiny_qwen4

    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen4.config().save_pretrained(folder)
    with runtime(folder, "--skip-tokenizer-init") as active:
        yield active


def request(rid: str) -> Req:
    params = SamplingParams(max_new_tokens=8)
    params.normalize(None)
    req = Req(rid, "", array("q", [1, 2, 3]), params, vocab_size=512)
    req.output_ids.append(7)
    return req


def process_decode(reqs: list[Req], *, overlap: bool) -> list[Req]:
    """Commit one decode step in which every request samples BAD_TOKEN; return the requests released unsaved."""
    names = SchedulerBatchResultProcessor.__dataclass_fields__
    processor = SchedulerBatchResultProcessor(
        **{name: mock.MagicMock() for name in names} | {"enable_overlap": overlap, "enable_overlap_mlx": False}
    )
    processor.beam_coordinator.commit_decode.return_value = set()
    batch = mock.MagicMock(reqs=reqs, return_logprob=False, spec_algorithm=SpeculativeAlgorithm.NONE)
    batch.batch_size.return_value = len(reqs)
    batch.mamba_track_mask_cpu = None
    result = mock.MagicMock(
        next_token_ids=torch.full((len(reqs),), BAD_TOKEN),
        routed_experts_output=None,
        indexer_topk_output=None,
        auxiliary_host_output=None,
        logits_output=SimpleNamespace(
            hidden_states=None, customized_info=None, sampling_mask_output=None, next_token_logprobs=None
        ),
    )
    released = []
    with (
        mock.patch.object(
            processor_module,
            "release_kv_cache",
            lambda req, tree, checkpoint: released.append(req) if not checkpoint else None,
        ),
        mock.patch.object(SchedulerBatchResultProcessor, "_handle_finish_state_updated_req"),
        mock.patch.object(SchedulerBatchResultProcessor, "_maybe_update_reasoning_tokens"),
    ):
        processor.process_batch_result_decode(batch, result)
    return released


@pytest.mark.red_on_stock
@pytest.mark.parametrize("overlap", [False, True])
def test_decode_drops_the_token_of_a_failed_request_only(overlap: bool) -> None:
    failed, healthy = request("failed"), request("healthy")
    failed.discard_output_reason = FINISH_ABORT(REASON, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    released = process_decode([failed, healthy], overlap=overlap)
    assert list(failed.output_ids) == [7]
    assert failed.finished()
    assert failed.finished_reason.to_json()["message"] == REASON
    assert released == [failed]
    assert list(healthy.output_ids) == [7, BAD_TOKEN]
    assert not healthy.finished()


def run_forward(
    failures: dict[int, str], reqs: list[Req], chunked: Req | None = None
) -> tuple[GenerationBatchResult, SimpleNamespace]:
    """Do what the scheduler does after a forward whose model reports `failures`."""
    worker = object.__new__(TpModelWorker)
    model = SimpleNamespace(take_failed_requests=lambda: failures)
    worker._model_runner = SimpleNamespace(model=model)
    scheduler = SimpleNamespace(tp_worker=worker, chunked_req=chunked, _pending_chunked_abort_req=None)
    result = GenerationBatchResult()
    Scheduler._collect_failed_requests(scheduler, SimpleNamespace(reqs=reqs), result)
    return result, scheduler


def discarded(reqs: list[Req]) -> list[bool]:
    return [req.discard_output_reason is not None for req in reqs]


@pytest.mark.red_on_stock
def test_only_the_reported_request_is_marked() -> None:
    reqs = [request("a"), request("b"), request("c")]
    result, scheduler = run_forward({1: REASON}, reqs)
    Scheduler._discard_failed_requests(scheduler, result)
    assert discarded(reqs) == [False, True, False]
    assert [req.skip_radix_cache_insert for req in reqs] == [False, True, False]
    assert reqs[1].discard_output_reason.to_json() == {
        "type": "abort",
        "message": REASON,
        "status_code": HTTPStatus.INTERNAL_SERVER_ERROR,
        "err_type": "InternalServerError",
    }


@pytest.mark.red_on_stock
def test_a_failure_waits_for_the_result_of_its_own_forward() -> None:
    """Overlap: forward N is launched, and fails, before the result of forward N - 1 is processed."""
    req = request("a")
    previous, _ = run_forward({}, [req])
    result, scheduler = run_forward({0: REASON}, [req])
    # Nothing that this forward wrote may be published, whatever is processed first.
    assert req.skip_radix_cache_insert
    Scheduler._discard_failed_requests(scheduler, previous)
    assert discarded([req]) == [False]
    process_decode([req], overlap=True)
    assert list(req.output_ids) == [7, BAD_TOKEN], "the token of the forward before was good"
    Scheduler._discard_failed_requests(scheduler, result)
    assert process_decode([req], overlap=True) == [req]
    assert list(req.output_ids) == [7, BAD_TOKEN]
    assert req.finished_reason.to_json()["message"] == REASON


@pytest.mark.red_on_stock
@pytest.mark.parametrize("gone", ["finished", "retracted"])
def test_a_request_that_left_with_the_result_before_keeps_its_answer(gone: str) -> None:
    """A forward past the last token is thrown away; a retracted request is computed, and read, anew."""
    req = request("a")
    result, scheduler = run_forward({0: REASON}, [req])
    if gone == "finished":
        req.finished_reason = FINISH_LENGTH(1)
    else:
        req.is_retracted = True
    Scheduler._discard_failed_requests(scheduler, result)
    assert discarded([req]) == [False]


@pytest.mark.red_on_stock
def test_results_are_processed_with_their_own_failures() -> None:
    req = request("a")
    result, _ = run_forward({0: REASON}, [req])
    scheduler = mock.MagicMock(scheduler_stage_metrics=None)
    scheduler._discard_failed_requests = lambda own: Scheduler._discard_failed_requests(scheduler, own)
    seen: list[bool] = []
    scheduler.batch_result_processor.process_batch_result_decode = lambda *args: seen.extend(discarded([req]))
    batch = mock.MagicMock(reqs=[req])
    batch.forward_mode.is_decode.return_value = True
    for own in (GenerationBatchResult(), result):
        Scheduler.process_batch_result(scheduler, batch, own)
    assert seen == [False, True]


@pytest.mark.red_on_stock
def test_a_row_of_no_request_fails_them_all() -> None:
    """Beam members have rows behind those of the requests; a beam group ends through `to_finish`."""
    reqs = [request("a"), request("b")]
    reqs[1].beam_group = object()
    result, scheduler = run_forward({2: REASON}, reqs)
    Scheduler._discard_failed_requests(scheduler, result)
    assert discarded(reqs) == [True, False]
    assert reqs[1].to_finish.to_json()["message"] == REASON


@pytest.mark.red_on_stock
def test_a_failed_chunk_stops_the_next_chunk() -> None:
    chunked, other = request("chunked"), request("other")
    _, scheduler = run_forward({1: REASON}, [other, chunked], chunked)
    assert scheduler._pending_chunked_abort_req is chunked
    assert chunked.discard_output_reason.message == REASON
    _, scheduler = run_forward({0: REASON}, [other, chunked], chunked)
    assert scheduler._pending_chunked_abort_req is None


@pytest.mark.red_on_stock
def test_a_model_without_the_method_fails_nothing() -> None:
    worker = object.__new__(TpModelWorker)
    worker._model_runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert worker.take_failed_requests() == {}
