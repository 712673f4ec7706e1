"""Offline use: the answers of the HTTP API, in input order, and an engine that is at rest whatever happened."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import overlap_serve
from overlap_serve.config import FakeModel, ServeConfig
from overlap_serve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelLoadError,
    ServerUnavailable,
)
from overlap_serve.llm import LLM, Completion, SamplingParams
from overlap_serve.llm.arguments import NOT_SAMPLING, SERVER_ONLY
from overlap_serve.runtime.local import LocalInbox
from tests.http_rig import MODEL, http_rig

FAKE: dict[str, object] = {"base_ms": 0.2, "max_model_len": 512}
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def module_llm() -> Iterator[LLM]:
    with LLM(engine="fake", fake=FAKE, kv_cache_tokens=4096) as llm:
        yield llm


@pytest.fixture(scope="module")
def module_slow() -> Iterator[LLM]:
    with LLM(engine="fake", fake={"base_ms": 20.0, "max_model_len": 512}) as llm:
        yield llm


@pytest.fixture
def slow(module_slow: LLM) -> Iterator[LLM]:
    """400 tokens take it 8 s; `rest` waits 2 s."""
    yield module_slow
    rest(module_slow)


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    yield module_llm
    rest(module_llm)


def rest(llm: LLM) -> None:
    """Wait until the loop has put away the last step."""
    never = threading.Event()
    for _ in range(200):
        if at_rest(llm):
            return
        never.wait(0.01)
    llm.check_at_rest()


def at_rest(llm: LLM) -> bool:
    try:
        llm.check_at_rest()
    except AssertionError:
        return False
    return True


def texts(results: list[Completion]) -> list[list[str]]:
    return [[choice.text for choice in result.choices] for result in results]


# -- the same as over HTTP


def test_the_same_seed_gives_the_answers_of_the_http_api() -> None:
    fake = FakeModel(base_ms=0.2, max_model_len=512, eos_every=9)
    sampling: dict[str, Any] = {"seed": 5, "n": 2, "max_tokens": 20, "temperature": 0.8, "stop": ["e", "7"]}
    prompts = ["one", "two", "three"]
    with http_rig(fake) as rig, rig.http() as client:
        over_http = client.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompts, "return_token_ids": True, **sampling}
        ).json()
        chat_http = client.post("/v1/chat/completions", json={"messages": QUESTION, **sampling}).json()
    with LLM(engine="fake", fake=fake.model_dump()) as llm:
        results = llm.generate(prompts, sampling)
        [chat] = llm.chat(QUESTION, SamplingParams(**sampling))
    offline = [
        {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids),
            "prompt_token_ids": list(result.prompt_token_ids),
        }
        for result in results
        for choice in result.choices
    ]
    assert offline == [{key: choice[key] for key in offline[0]} for choice in over_http["choices"]]
    assert {choice["finish_reason"] for choice in offline} >= {"stop"}
    assert sum(result.usage.completion_tokens for result in results) == over_http["usage"]["completion_tokens"]
    assert sum(result.usage.prompt_tokens for result in results) == over_http["usage"]["prompt_tokens"]
    assert [choice.text for choice in chat.choices] == [c["message"]["content"] for c in chat_http["choices"]]
    assert chat.usage.completion_tokens == chat_http["usage"]["completion_tokens"]


def test_a_stream_says_what_chat_says(llm: LLM) -> None:
    sampling = SamplingParams(seed=1, max_tokens=12)
    [whole] = llm.chat(QUESTION, sampling)
    pieces = list(llm.stream_chat(QUESTION, sampling))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert sum((piece.token_ids for piece in pieces), ()) == whole.choices[0].token_ids
    assert len(pieces) > 1


def test_a_stream_that_is_left_frees_its_slot(slow: LLM) -> None:
    stream = slow.stream_chat(QUESTION, {"max_tokens": 400})
    assert next(stream).finish_reason is None
    stream.close()


# -- shapes of arguments


def test_results_come_in_the_order_of_the_prompts_whatever_their_lengths(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(40)]
    sampling = [SamplingParams(seed=i, max_tokens=1 + (7 * i) % 23) for i in range(40)]
    results = llm.generate(prompts, sampling)
    assert [len(result.choices[0].token_ids) for result in results] == [1 + (7 * i) % 23 for i in range(40)]
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, sampling, strict=True)]
    assert texts(results) == texts(alone)


def test_more_prompts_than_the_engine_may_queue_all_get_their_answer() -> None:
    with LLM(engine="fake", fake=FAKE, max_running_requests=4, max_waiting_requests=3) as llm:
        results = llm.generate([f"{i}" for i in range(50)], {"seed": 0, "max_tokens": 2})
        rest(llm)
    assert [bytes(result.prompt_token_ids[1:]).decode() for result in results] == [f"{i}" for i in range(50)]
    assert all(result.choices[0].finish_reason == "length" for result in results)


def test_token_ids_are_a_prompt_and_may_stand_beside_texts(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    ids = [104, 105]
    [one] = llm.generate(ids, greedy)
    assert one.prompt_token_ids == (104, 105)
    prompts: list[str | Sequence[int]] = ["hi", (104, 105), range(104, 106)]
    mixed = llm.generate(prompts, {"temperature": 0, "max_tokens": 4, "add_special_tokens": False})
    assert [result.prompt_token_ids for result in mixed] == [(104, 105)] * 3
    assert texts(mixed) == [[one.text]] * 3


def test_many_conversations_and_one(llm: LLM) -> None:
    other = [{"role": "system", "content": "short"}, {"role": "user", "content": "ho"}]
    both = llm.chat([QUESTION, other], {"seed": 2, "max_tokens": 5})
    assert texts(both) == texts(llm.chat(QUESTION, {"seed": 2, "max_tokens": 5})) + texts(
        llm.chat(other, {"seed": 2, "max_tokens": 5})
    )


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_choices_differ_and_stop_strings_end_them(llm: LLM) -> None:
    [result] = llm.generate("x", SamplingParams(seed=3, n=4, max_tokens=30))
    assert len({choice.text for choice in result.choices}) == 4
    stop = result.choices[0].text[5:7]
    [cut] = llm.generate("x", SamplingParams(seed=3, n=4, max_tokens=30, stop=(stop,)))
    assert cut.choices[0].text == result.choices[0].text[:5]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)


def test_a_stop_string_ends_the_work_too(slow: LLM) -> None:
    [free] = slow.generate("x", {"seed": 3, "max_tokens": 4})
    [cut] = slow.generate("x", {"seed": 3, "max_tokens": 400, "stop": free.text[1]})
    assert cut.text == free.text[:1]


def test_without_a_seed_prompts_differ(llm: LLM) -> None:
    results = llm.generate(["same"] * 3, {"max_tokens": 16})
    assert len({result.text for result in results}) == 3


def test_logit_bias_has_integer_keys(llm: LLM) -> None:
    [result] = llm.generate("x", SamplingParams(logit_bias={65: 1}, max_tokens=2))
    assert result.choices[0].finish_reason == "length"


def test_logprobs_come_with_their_tokens(llm: LLM) -> None:
    asked = SamplingParams(seed=1, max_tokens=3, n=2, logprobs=2, prompt_logprobs=1)
    for [result] in (llm.generate("hi", asked), llm.chat(QUESTION, asked)):
        for choice in result.choices:
            assert choice.logprobs is not None
            assert tuple(item.token_id for item in choice.logprobs) == choice.token_ids
            assert [len(item.top) for item in choice.logprobs] == [2, 2, 2]
        assert result.prompt_logprobs is not None
        assert tuple(item.token_id for item in result.prompt_logprobs) == result.prompt_token_ids
    [plain] = llm.generate("hi", {"max_tokens": 1})
    assert (plain.choices[0].logprobs, plain.prompt_logprobs) == (None, None)


def test_what_is_late_ends_with_abort(llm: LLM) -> None:
    results = llm.generate(["a", "b"], [{"max_tokens": 3}, {"max_tokens": 400, "timeout_s": 0.02}])
    assert [result.choices[0].finish_reason for result in results] == ["length", "abort"]
    assert results[1].choices[0].stop_reason == "deadline"


def test_calls_from_several_threads_share_the_engine(llm: LLM) -> None:
    found: dict[int, list[list[str]]] = {}

    def call(i: int) -> None:
        found[i] = texts(llm.generate([f"{i} {j}" for j in range(5)], {"seed": i, "max_tokens": 10}))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert found[i] == texts(llm.generate([f"{i} {j}" for j in range(5)], {"seed": i, "max_tokens": 10}))


# -- mistakes


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        (5, None, ("prompts must be", "int")),
        (b"bytes", None, ("prompts must be", "bytes")),
        (["a", 3], None, ("prompts[1]", "int")),
        (["a", ""], None, ("prompt [1]", "empty")),
        (["a", [1, 999]], None, ("prompt [1]", "999", "0 to 257")),
        ("half \ud800", None, ("surrogate",)),
        ("a", {"temprature": 1}, ("temprature", "not a known field")),
        ("a", {"temperature": 3.0}, ("temperature", "2")),
        ("a", {"temperature": "hot"}, ("temperature", "a number")),
        ("a", {"stream": True}, ("stream", "not a sampling parameter")),
        ("a", {"metadata": {}}, ("metadata", "no effect")),
        ("a", {"n": 500}, ("n is 500", "128")),
        ("a", "greedy", ("sampling must be",)),
        (["a", "b"], [None], ("sampling has 1 entries for 2 prompts",)),
        (["a", "b"], [None, 7], ("sampling must be", "int")),
        ("a", {"max_tokens": 600}, ("maximum context length is 512",)),
    ],
)
def test_wrong_arguments_say_what_is_wrong(llm: LLM, prompts: Any, sampling: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, sampling)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", ("messages must be a list", "str")),
        ([QUESTION, "hi"], ("messages[1] must be a list",)),
        ([QUESTION, [{"role": "king", "content": "x"}]], ("prompt [1]", "king")),
        ([{"role": "user"}], ("content",)),
        ([{"role": "user", "content": "x", "colour": "red"}], ("messages.colour", "no effect")),
    ],
)
def test_wrong_messages_say_what_is_wrong(llm: LLM, messages: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages)
    for word in words:
        assert word in caught.value.message


def test_a_prompt_that_is_too_long_is_named_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        pytest.fail("something ran")

    monkeypatch.setattr(LocalInbox, "put", run)
    prompts: list[str | list[int]] = ["a", "b", [1] * 600, "c"]
    with pytest.raises(ContextLengthExceeded, match=r"prompt \[2\]: .*has 600 tokens"):
        llm.generate(prompts)
    monkeypatch.undo()


def test_a_stream_has_one_choice(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n is 2"):
        llm.stream_chat(QUESTION, {"n": 2})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pagesize": 1}, "pagesize: unknown field; did you mean page_size"),
        ({"api_keys": ["k"], "ingress_replicas": 2}, "api_keys, ingress_replicas: only a server"),
        ({"max_step_tokens": 4}, "max_step_tokens"),
    ],
)
def test_wrong_fields_of_the_engine_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(engine="fake", **fields)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        LLM("./no-such-model")


def test_a_servers_configuration_is_taken_whole_and_not_changed() -> None:
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=0.0), api_keys=("k",), ingress_replicas=2)
    with LLM(config) as llm:
        assert len(llm.generate("x", {"max_tokens": 1})) == 1
    with pytest.raises(ConfigError, match="page_size: set them in the ServeConfig"):
        LLM(config, page_size=8)


def test_every_field_of_the_configuration_acts_offline_or_is_refused() -> None:
    """A new field of ServeConfig must be placed: in SERVER_ONLY, or here, because it acts."""
    acts = set(
        """model revision load_format chat_template max_model_len seed engine fake device dtype attention_backend num_threads overlap_depth
        page_size kv_cache_tokens kv_memory_fraction prefix_cache max_running_requests max_waiting_requests max_step_tokens
        max_decode_gap_steps max_prefill_wait_steps max_bypass priority max_messages max_n max_prompt_tokens default_max_tokens
        clamp_max_tokens max_timeout trust_request_chat_template""".split()
    )
    assert acts.isdisjoint(SERVER_ONLY)
    assert acts | SERVER_ONLY == set(ServeConfig.model_fields)
    assert NOT_SAMPLING.isdisjoint(SamplingParams.__dataclass_fields__)


# -- ends


def test_ctrl_c_ends_the_call_and_the_engine_goes_on(slow: LLM) -> None:
    """Ctrl-C: SIGINT to this process while it waits for the engine."""
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        slow.generate(["endless"] * 8, {"max_tokens": 400, "n": 2}, progress=False)
    timer.join()
    rest(slow)
    assert slow.generate("next", {"max_tokens": 2})[0].usage.completion_tokens == 2


def test_after_close_calls_are_refused_and_closing_twice_is_fine() -> None:
    llm = LLM(engine="fake", fake=FAKE)
    llm.close()
    llm.close()
    with pytest.raises(ServerUnavailable, match="closed"):
        llm.generate("x")


def test_close_ends_a_call_of_another_thread() -> None:
    llm = LLM(engine="fake", fake=FAKE)
    stream = llm.stream_chat(QUESTION, {"max_tokens": 400})
    next(stream)
    closer = threading.Thread(target=llm.close)
    closer.start()
    last = list(stream)[-1]
    closer.join()
    assert (last.finish_reason, last.stop_reason) == ("abort", "shutdown")


def test_an_engine_that_fails_fails_the_call_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engine="fake", fake=FAKE)

    def broken(*_: object) -> int:
        raise RuntimeError("out of paint")

    monkeypatch.setattr("overlap_serve.engine.fake.next_token", broken)
    with pytest.raises(ServerUnavailable, match="engine failed: RuntimeError"):
        llm.generate("x")
    llm.close()
    with pytest.raises(ServerUnavailable, match="out of paint"):
        llm.generate("x")


def test_an_llm_that_nobody_uses_any_more_ends_its_thread() -> None:
    llm = LLM(engine="fake", fake=FAKE)
    gone = weakref.ref(llm)
    threads = {thread for thread in threading.enumerate() if thread.name == "overlap-loop" and thread.is_alive()}
    del llm
    gc.collect()
    assert gone() is None
    assert any(not thread.is_alive() for thread in threads)


def test_a_script_ends_without_close() -> None:
    code = "from overlap_serve import LLM; llm = LLM(engine='fake'); print(len(llm.generate('x', {'max_tokens': 1})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


# -- the package's face


def test_public_names_are_there_on_first_use() -> None:
    assert overlap_serve.LLM is LLM
    assert overlap_serve.SamplingParams is SamplingParams
    assert overlap_serve.ServeConfig is ServeConfig
    assert {"LLM", "SamplingParams", "ServeConfig"} <= set(dir(overlap_serve))
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = overlap_serve.Nonsense  # type: ignore[attr-defined]


def test_the_fake_engine_offline_loads_neither_torch_nor_ray_nor_zmq_sockets() -> None:
    code = (
        "import sys; from overlap_serve import LLM; LLM(engine='fake').generate('x', {'max_tokens': 1});"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_progress_is_shown_on_terminals_unless_it_is_off(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], progress: bool, shown: bool
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    llm.generate(["a", "b"], {"max_tokens": 3}, progress=progress)
    assert ("2/2" in stderr.getvalue() and "tokens/s" in stderr.getvalue()) is shown
    assert bool(stderr.getvalue()) is shown
