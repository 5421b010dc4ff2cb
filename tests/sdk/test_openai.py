"""OpenAI's SDK, unchanged but for its base URL and key."""

import threading
import unittest

import openai

from provider import Provider
from support import Gate, Ledger, free_port, keys_in, wait_until

PROVIDERS_KEY = "sk-of-the-provider-0123456789"

CONFIG = """
[recovery]
heartbeat = "500ms"
lease = "2s"
sweep = "500ms"

# A provider that nothing is known of.
[downstreams.openai]
url = "http://127.0.0.1:{port}"
credential = {{ bearer_env = "PROVIDERS_KEY" }}

# One that remembers keys.
[downstreams.remembers]
url = "http://127.0.0.1:{port}"
credential = {{ bearer_env = "PROVIDERS_KEY" }}

[[downstreams.remembers.routes]]
path = "/v1/chat/completions"
idempotency = "key"
key_retention = "24h"

# One that wants no credential: nothing of ours takes the place of the agent's.
[downstreams.open]
url = "http://127.0.0.1:{port}"

[downstreams.nobody]
url = "http://127.0.0.1:{nobody}"
"""
MESSAGES = [{"role": "user", "content": "Write a draft."}]


class OpenAi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.provider = Provider()
        cls.addClassCleanup(cls.provider.close)
        # Before the provider, so that its answers can be held back.
        cls.back = Gate(cls.provider.port)
        cls.addClassCleanup(cls.back.close)
        config = CONFIG.format(port=cls.back.port, nobody=free_port())
        cls.ledger = Ledger(config, {"PROVIDERS_KEY": PROVIDERS_KEY})
        cls.addClassCleanup(cls.ledger.stop)
        # Before the ledger, likewise.
        cls.front = Gate(cls.ledger.port)
        cls.addClassCleanup(cls.front.close)

    def setUp(self):
        self.provider.forget()
        self.back.forget()
        self.front.forget()
        # The ledger is the same for all, so every test has ids of its own.
        self.key = f"{self._testMethodName}:draft-1"

    def client(self, downstream="openai", **options):
        base = f"http://127.0.0.1:{self.front.port}/v1/proxy/{downstream}/v1"
        return openai.OpenAI(api_key=self.ledger.key, base_url=base, **{"max_retries": 0, "timeout": 60, **options})

    def ask(self, key, stream=False, **options):
        client = self.client(**options)
        return client.chat.completions.create(
            model="m", messages=MESSAGES, stream=stream, extra_headers={"Idempotency-Key": key}
        )

    def text(self, key, **options):
        return self.ask(key, **options).choices[0].message.content

    def streamed(self, key, **options):
        return [chunk.choices[0].delta.content for chunk in self.ask(key, stream=True, **options)]

    def raw(self, key):
        """A stream's bytes, and whether they are a replay."""
        with self.client().chat.completions.with_streaming_response.create(
            model="m", messages=MESSAGES, stream=True, extra_headers={"Idempotency-Key": key}
        ) as answer:
            return b"".join(answer.iter_bytes()), answer.headers.get("Idempotent-Replayed")

    def assert_unknown(self, call):
        with self.assertRaises(openai.ConflictError) as raised:
            call()
        self.assertEqual(raised.exception.body["code"], "outcome-unknown")

    def in_background(self, call):
        def run():
            try:
                call()
            except openai.OpenAIError:
                pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def test_a_repeated_call_is_answered_without_the_provider(self):
        first = self.text(self.key)
        self.assertEqual(self.text(self.key), first)
        self.assertEqual((self.provider.requests, self.provider.generated), (1, 1))
        self.assertNotEqual(self.text(self.key + ":rev-2"), first)
        with self.assertRaises(openai.UnprocessableEntityError) as raised:
            self.client().chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Write another."}],
                extra_headers={"Idempotency-Key": self.key},
            )
        self.assertEqual(raised.exception.body["code"], "fingerprint-mismatch")
        self.assertEqual(self.provider.generated, 2)

    def test_neither_side_sees_the_others_credential(self):
        self.text(self.key)
        self.text(self.key + ":open", downstream="open")
        self.assertEqual(self.provider.authorizations, [f"Bearer {PROVIDERS_KEY}", None])
        self.assertNotIn(self.ledger.key.encode(), self.back.sent)
        self.assertNotIn(PROVIDERS_KEY.encode(), self.front.received)
        self.assertNotIn(PROVIDERS_KEY, self.ledger.log.read_text())

    def test_killed_before_its_answer_arrives_the_same_call_gets_the_same_answer(self):
        self.front.shut()
        call = self.in_background(lambda: self.text(self.key))
        # The ledger has answered, and its answer is on its way.
        wait_until(lambda: b"draft number 1" in self.front.received, "the ledger's answer")
        self.ledger.kill()
        self.front.reopen()
        call.join()
        self.ledger.start()
        self.assertEqual(self.text(self.key), "draft number 1")
        self.assertEqual((self.provider.requests, self.provider.generated), (1, 1))

    def test_killed_before_the_providers_answer_arrives_a_key_brings_the_same_answer(self):
        self.back.shut()
        call = self.in_background(lambda: self.text(self.key, downstream="remembers"))
        wait_until(lambda: b"draft number 1" in self.back.received, "the provider's answer")
        self.ledger.kill()
        call.join()
        self.back.reopen()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "succeeded", "recovery")
        self.assertEqual(self.text(self.key, downstream="remembers"), "draft number 1")
        self.assertEqual((self.provider.requests, self.provider.generated), (2, 1))

    def test_killed_before_the_providers_answer_arrives_without_a_key_it_is_unknown(self):
        self.back.shut()
        call = self.in_background(lambda: self.text(self.key))
        wait_until(lambda: b"draft number 1" in self.back.received, "the provider's answer")
        self.ledger.kill()
        call.join()
        self.back.reopen()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "needs_reconciliation", "recovery")
        self.assert_unknown(lambda: self.text(self.key))
        self.assertEqual((self.provider.requests, self.provider.generated), (1, 1))

    def test_a_stream_killed_before_it_arrives_is_brought_by_a_key(self):
        self.back.shut()
        call = self.in_background(lambda: self.streamed(self.key, downstream="remembers"))
        wait_until(lambda: b"[DONE]" in self.back.received, "the provider's answer")
        self.ledger.kill()
        call.join()
        self.back.reopen()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "succeeded", "recovery")
        self.assertEqual("".join(self.streamed(self.key, downstream="remembers")), "draft number 1 ")
        self.assertEqual((self.provider.requests, self.provider.generated), (2, 1))

    def test_a_stream_killed_in_its_middle_without_a_key_is_unknown(self):
        self.provider.paused.clear()
        stream = iter(self.ask(self.key, stream=True))
        next(stream)
        self.ledger.kill()
        with self.assertRaises(openai.APIConnectionError):
            list(stream)
        self.provider.paused.set()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "needs_reconciliation", "recovery")
        self.assert_unknown(lambda: self.streamed(self.key))
        self.assertEqual(self.provider.requests, 1)

    def test_a_completed_stream_is_replayed_byte_for_byte(self):
        first, replayed = self.raw(self.key)
        self.assertIn(b"data: [DONE]", first)
        self.assertIsNone(replayed)
        self.assertEqual(self.raw(self.key), (first, "true"))
        self.assertEqual(self.provider.requests, 1)

    def test_what_we_refuse_or_only_accept(self):
        # This SDK makes up no key of its own.
        with self.assertRaises(openai.BadRequestError) as raised:
            self.client().chat.completions.create(model="m", messages=MESSAGES)
        self.assertEqual(raised.exception.body["code"], "key-missing")
        with self.assertRaises(openai.InternalServerError) as raised:
            self.ask(self.key, downstream="nobody", max_retries=1)
        self.assertEqual((raised.exception.status_code, raised.exception.body["code"]), (502, "downstream-unreachable"))
        self.assertEqual(keys_in(self.front.sent), [self.key, self.key])
        self.assertEqual(self.provider.requests, 0)
        accepted = self.ask(self.key, default_headers={"Prefer": "respond-async"})
        # The SDK takes it for an answer.
        self.assertIsNone(accepted.choices)
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "succeeded", "the answer")
        self.assertEqual(self.text(self.key), "draft number 1")
        self.assertEqual(self.provider.requests, 1)

    def test_a_stream_is_passed_on_as_it_comes_and_replayed_piece_by_piece(self):
        self.provider.paused.clear()
        stream = iter(self.ask(self.key, stream=True))
        # The provider waits after its first event, and we have it.
        first = next(stream).choices[0].delta.content
        self.provider.paused.set()
        pieces = [first] + [chunk.choices[0].delta.content for chunk in stream]
        self.assertEqual("".join(pieces), "draft number 1 ")
        self.assertEqual(self.streamed(self.key), pieces)
        self.assertEqual(self.provider.requests, 1)

    def test_a_stream_that_breaks_off_is_unknown(self):
        self.provider.cut_after = 2
        with self.assertRaises(openai.APIConnectionError):
            self.streamed(self.key)
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "needs_reconciliation", "the end of the stream")
        self.assert_unknown(lambda: self.streamed(self.key))
        self.assertEqual(self.provider.requests, 1)

    def test_a_stream_that_its_reader_leaves_is_stored_to_its_end(self):
        self.provider.paused.clear()
        stream = self.ask(self.key, stream=True)
        next(iter(stream))
        stream.close()
        self.assertEqual(self.ledger.operation(self.key)["state"], "running")
        self.provider.paused.set()
        wait_until(lambda: self.ledger.operation(self.key)["state"] == "succeeded", "the end of the stream")
        self.assertEqual("".join(self.streamed(self.key)), "draft number 1 ")
        self.assertEqual(self.provider.requests, 1)


if __name__ == "__main__":
    unittest.main()
