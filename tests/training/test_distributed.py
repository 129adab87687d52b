"""Several processes: their gradients and trainings are those of one; a lost process ends the others, clearly."""

from __future__ import annotations

import socket
import sys
from itertools import chain

import pytest
import torch
from helpers import distributed_worker
from torch import multiprocessing as mp

from nearkin.cli.doctor import summarize_gradient_check
from nearkin.errors import ConfigError, ProcessLostError
from nearkin.losses import LOSSES
from nearkin.losses.miners import MINERS
from nearkin.training import distributed as nd
from nearkin.training import distributed_check
from nearkin.training.distributed_check import (
    TOLERANCE,
    Case,
    GradientCheck,
    cases,
    check_gradients,
    differences,
    own_rows,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two real processes found; one pair does everything, because each spends seconds to import torch."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(distributed_worker.main, (folder, port), nprocs=2)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in (0, 1)]


# --- objectives that gather by themselves ---------------------------------------------------------------------------


def test_gathering_objectives_give_the_gradients_of_one_process(ranks):
    expected = distributed_worker.gathering(slice(0, 10), gather=None)
    for found in ranks:
        assert found["gathering"].keys() == expected.keys()
        for name, values in found["gathering"].items():
            for got, wanted in zip(values, expected[name], strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12, msg=name)


def test_an_objective_that_sees_part_of_the_batch_says_so_once(ranks):
    for rank, found in enumerate(ranks):
        [message] = found["warned"]
        assert message.startswith(f"triplet: rank {rank} of 2 computes the loss of its own part of the batch")
        assert "gather=True" in message


# --- gradients --------------------------------------------------------------------------------------------------------


def test_the_cases_are_every_loss_miner_and_memory():
    every = cases()
    for name, entry in LOSSES.items():
        ours = [case for case in every if case.loss == name]
        assert {case.split for case in ours} == {"even shares", "uneven shares", "one rank idle"}
        miners = {"multi_similarity"} if entry.inputs.pairs else set()
        if name in ("contrastive", "triplet"):
            miners = set(MINERS) - {"all"}
        assert {case.miner for case in ours} == {None, *miners}
        used = {False, True} if entry.inputs.memory else {False}
        assert {case.memory > 0 for case in ours} == {case.refs for case in ours} == used
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_way_of_sharing_covers_the_batch(world):
    for split in ("even shares", "uneven shares", "one rank idle"):
        rows = [list(range(24))[own_rows(24, split, rank, world)] for rank in range(world)]
        assert list(chain(*rows)) == list(range(24))
        lengths = sorted(map(len, rows))
        assert lengths.count(0) == (split == "one rank idle")
        assert split != "even shares" or lengths[-1] - lengths[0] <= 1
        assert split != "uneven shares" or lengths[-1] > lengths[0] + 1


def test_gradients_are_those_of_one_process():
    """float64: to the last bits, whatever the loss, the miner and the shares."""
    rows = check_gradients(2, dtype=torch.float64)
    assert [row.case for row in rows] == cases()
    assert max(row.worst for row in rows) < 1e-10


def test_the_certificate():
    """As `nearkin doctor --distributed` makes it: float32, processes of its own."""
    rows = check_gradients(2)
    assert [row.case for row in rows] == cases()
    assert max(row.worst for row in rows) < TOLERANCE == 1e-5
    table, verdict = summarize_gradient_check(rows)
    assert table.row_count == len(LOSSES)
    assert verdict.startswith(f"passed: {len(cases())} cases")


def test_a_difference_is_not_certified():
    good = GradientCheck(Case("triplet"), 0.0, 1e-7, None)
    bad = GradientCheck(Case("margin", "hard", 40, split="uneven shares"), 0.0, 1e-7, 2e-3)
    table, verdict = summarize_gradient_check([good, bad, GradientCheck(Case("margin"), 0.0, float("inf"), None)])
    assert table.row_count == 2
    assert "FAILED: 2 of 3 cases" in verdict
    assert "margin, miner hard, memory 40, uneven shares: 2e-03" in verdict


def test_differences_show_what_is_wrong():
    want = {"embeddings 0": torch.ones(4, 2), "network": torch.ones(3)}
    assert differences(want, want) == {"embeddings": 0.0, "network": 0.0}
    assert differences({**want, "embeddings 0": torch.ones(4, 2) * 1.5}, want) == {"embeddings": 0.5, "network": 0.0}
    for broken in (torch.full((4, 2), float("nan")), torch.ones(4, 3)):
        assert differences({**want, "embeddings 0": broken}, want)["embeddings"] == float("inf")
    nothing = {"embeddings 0": torch.ones(4, 2), "network": torch.zeros(3)}
    assert differences(nothing, nothing)["network"] == float("inf")


# --- batch norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", distributed_worker.SHARES, ids=str)
def test_synchronised_batch_norm_is_that_of_one_process(ranks, shares):
    """Outputs, gradients and running statistics, with one image on a rank, and with none; torch's own layer alone."""
    want = distributed_worker.normalized([7], torch.float64)
    for found in ranks:
        got = found["normalized"][f"{shares}"]
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_the_first_step_of_glyphs_small_is_that_of_one_process(tmp_path, glyphs_table):
    """In three processes (42, 43 and 43 of the 128 images) and in two."""
    mp.spawn(distributed_worker.first_steps, (tmp_path,), nprocs=3)
    want = distributed_worker.first_step()
    for file in [f"{ranks}-{rank}" for ranks in (2, 3) for rank in range(ranks)]:
        got = torch.load(tmp_path / f"{file}.pt", weights_only=True)
        assert got.keys() == want.keys()
        for name, value in want.items():
            scale = float(value.abs().max())
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-10 * scale, msg=f"{file}: {name}")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", distributed_worker.TRAININGS)
def test_two_epochs_end_as_in_one_process(ranks, name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    want = distributed_worker.train(name)
    torch.set_num_threads(threads)
    assert len(want["losses"]) == 10  # two epochs of 5 batches: ten classes of three groups, 7 groups a batch
    for found in ranks:
        got = found["trained"][name]
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()), msg=key)
    first, second = (found["trained"][name] for found in ranks)
    for key in want:
        assert torch.equal(first[key], second[key]), f"{key} differs between the ranks"


# --- parts ------------------------------------------------------------------------------------------------------------


def test_helpers(ranks):
    for rank, found in enumerate(ranks):
        small = found["small"]
        assert (small["rank"], small["world"], small["first"]) == (rank, 2, rank == 0)
        assert small["share"] == [[0, 3], [3, 7]][rank]
        assert small["anywhere"] == [True, False]
        assert small["broadcast_object"] == {"score": 0.5}
        assert found["place"] == "cpu"
        assert found["world after"] == 1


def test_rows_arrive_whole_and_in_order(ranks):
    for found in ranks:
        small = found["small"]
        for got in small["kinds"]:
            want = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 2], [3, 4], [5, 6]]).to(got.dtype)
            assert torch.equal(got, want)
        assert small["uneven"] == [[[1, 1], [1, 1]]] * 3
        assert small["nothing"] == [0, 4]


def test_gathering_and_its_gradient(ranks):
    for rank, found in enumerate(ranks):
        emb, labels, grad = found["small"]["gathered"]
        assert emb == [[0.0] * 3] * 2 + [[1.0] * 3] * 3
        assert labels == [0, 1, 10, 11, 12]
        weights = [[0.0, 1.0], [2.0, 3.0, 4.0]][rank]  # of the whole batch's sum, own rows, times two ranks
        assert grad == [[2 * w] * 3 for w in weights]


def test_gradients_are_averaged(ranks):
    for found in ranks:
        here, nowhere, both = found["small"]["reduced"]
        assert torch.equal(here, torch.full((2, 3, 4, 4), 0.5))
        assert nowhere
        assert torch.equal(both, torch.arange(96.0).view(2, 3, 4, 4) * 1.5)
        assert found["small"]["broadcast"] == [[2.0] * 3, 7]


def test_misfits_are_refused_on_every_rank(ranks):
    for found in ranks:
        width, labels, dtype, module, empty = found["mistakes"]
        assert "torch.float32 [n, 3] and torch.int64 [n]; torch.float32 [n, 4]" in width
        assert labels == "all_gather_with_grad: [2, 2] embeddings but [2, 3] labels on ranks 0 to 1."
        assert "between ranks 0 to 1: torch.float32 [n]; torch.float64 [n]" in dtype
        assert "Objective: parameters or buffers differ in name, shape or dtype" in module
        assert empty == "emb: the batch is empty."


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_of_one_machine_listen_on_the_loopback_only(ranks):
    for found in ranks:
        assert found["listening"]
        assert set(found["listening"]) == {"0100007F"}  # 127.0.0.1
        assert not found["environment"]


def test_a_lost_process_ends_the_others(ranks):
    message, seconds, after = ranks[0]["sleeps"]
    assert message.startswith("process 0 of 2: another process died or did not respond for 3 s (Timed out")
    assert 3 <= seconds < 20
    assert ranks[1]["sleeps"][0].startswith("process 1 of 2: another process died")
    message, seconds, after = ranks[0]["dies"]
    assert message.startswith("process 0 of 2: another process died")
    assert "Connection" in message
    assert message.endswith("to resume from the last checkpoint.")
    assert seconds < 20
    assert after == 1
    assert "dies" not in ranks[1]


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "DataError: no disk"), ("is killed", "process 1 terminated with signal SIGKILL")]
)
def test_a_check_that_loses_a_process_ends_and_says_why(monkeypatch, how, message):
    monkeypatch.setenv("HOW", how)
    monkeypatch.setattr(distributed_check, "_work", distributed_worker.ends_early)
    with pytest.raises(ProcessLostError, match=message):
        check_gradients(2)


def test_alone_nothing_is_joined(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with nd.process_group("cpu") as place:
        assert (str(place), nd.rank(), nd.world_size(), nd.is_main_process()) == ("cpu", 0, 1, True)
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    nd.all_reduce_gradients([p])
    assert p.grad.tolist() == [1.0, 1.0]
    nd.broadcast_state(torch.nn.Linear(1, 1))
    assert nd.broadcast_object(3) == 3
    assert nd.any_rank(True)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: expected a whole number in the environment, got 'two'"):
        nd.process_group("cpu").__enter__()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK: expected a whole number in the environment, got None"):
        nd.process_group("cpu").__enter__()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"process 0 of 2: .*MASTER_ADDR expected, but not set.* Start with torchrun"):
        nd.process_group("cpu").__enter__()
    with pytest.raises(ConfigError, match="training in 2 processes works on cpu or cuda, not on meta"):
        nd.process_group("meta").__enter__()


def test_drawing_from_numbers_leaves_no_trace():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draws = []
    for numbers in [(0, 1, 2), (0, 1, 2), (0, 1, 3)]:
        with nd.fork_rng(*numbers):
            draws.append(torch.rand(4))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
