"""OpenAI's SDK, unchanged but for its base URL and key."""

import threading
import unittest

import openai

from provider import Provider
from support import Gate, Ledger, wait_until

PROVIDERS_KEY = "sk-of-the-provider-0123456789"

CONFIG = """
[recovery]
heartbeat = "500ms"
lease = "2s"
sweep = "500ms"

[downstreams.openai]
url = "http://127.0.0.1:{port}"
credential = {{ bearer_env = "PROVIDERS_KEY" }}

[[downstreams.openai.routes]]
path = "/v1/chat/completions"
idempotency = "{ability}"
{more}
"""
REMEMBERS = 'key_retention = "24h"'
MESSAGES = [{"role": "user", "content": "Write a draft."}]


class OpenAi(unittest.TestCase):
    def serve(self, ability, more=""):
        self.provider = Provider()
        self.addCleanup(self.provider.close)
        # Before the provider, so that its answers can be held back.
        self.back = Gate(self.provider.port)
        self.addCleanup(self.back.close)
        config = CONFIG.format(port=self.back.port, ability=ability, more=more)
        self.ledger = Ledger(config, {"PROVIDERS_KEY": PROVIDERS_KEY})
        self.addCleanup(self.ledger.stop)
        # Before the ledger, likewise.
        self.front = Gate(self.ledger.port)
        self.addCleanup(self.front.close)

    def client(self, **options):
        base = f"http://127.0.0.1:{self.front.port}/v1/proxy/openai/v1"
        return openai.OpenAI(api_key=self.ledger.key, base_url=base, **{"max_retries": 0, "timeout": 60, **options})

    def ask(self, key, stream=False, **options):
        client = self.client(**options)
        return client.chat.completions.create(
            model="m", messages=MESSAGES, stream=stream, extra_headers={"Idempotency-Key": key}
        )

    def text(self, key, **options):
        return self.ask(key, **options).choices[0].message.content

    def streamed(self, key):
        return [chunk.choices[0].delta.content for chunk in self.ask(key, stream=True)]

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
        self.serve("none")
        first = self.text("draft-1")
        self.assertEqual(self.text("draft-1"), first)
        self.assertEqual((self.provider.requests, self.provider.generated), (1, 1))
        self.assertNotEqual(self.text("draft-2"), first)
        with self.assertRaises(openai.UnprocessableEntityError):
            self.client().chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Write another."}],
                extra_headers={"Idempotency-Key": "draft-1"},
            )
        self.assertEqual(self.provider.generated, 2)

    def test_neither_side_sees_the_others_credential(self):
        self.serve("none")
        self.text("draft-1")
        self.assertEqual(self.provider.authorizations, [f"Bearer {PROVIDERS_KEY}"])
        self.assertNotIn(self.ledger.key.encode(), self.back.sent)
        self.assertNotIn(PROVIDERS_KEY.encode(), self.front.received)
        self.assertNotIn(PROVIDERS_KEY, self.ledger.log.read_text())

    def test_killed_before_its_answer_arrives_the_same_call_gets_the_same_answer(self):
        self.serve("none")
        self.front.shut()
        call = self.in_background(lambda: self.text("draft-1"))
        # The ledger has answered, and its answer is on its way.
        wait_until(lambda: b"draft number 1" in self.front.received, "the ledger's answer")
        self.ledger.kill()
        self.front.reopen()
        call.join()
        self.ledger.start()
        self.assertEqual(self.text("draft-1"), "draft number 1")
        self.assertEqual((self.provider.requests, self.provider.generated), (1, 1))

    def test_killed_before_the_providers_answer_arrives_a_key_brings_the_same_answer(self):
        self.serve("key", REMEMBERS)
        self.back.shut()
        call = self.in_background(lambda: self.text("draft-1"))
        wait_until(lambda: b"draft number 1" in self.back.received, "the provider's answer")
        self.ledger.kill()
        call.join()
        self.back.reopen()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation("draft-1")["state"] == "succeeded", "recovery")
        self.assertEqual(self.text("draft-1"), "draft number 1")
        self.assertEqual((self.provider.requests, self.provider.generated), (2, 1))

    def test_killed_before_the_providers_answer_arrives_without_a_key_it_is_unknown(self):
        self.serve("none")
        self.back.shut()
        call = self.in_background(lambda: self.text("draft-1"))
        wait_until(lambda: b"draft number 1" in self.back.received, "the provider's answer")
        self.ledger.kill()
        call.join()
        self.back.reopen()
        self.ledger.start()
        wait_until(lambda: self.ledger.operation("draft-1")["state"] == "needs_reconciliation", "recovery")
        with self.assertRaises(openai.ConflictError) as raised:
            self.text("draft-1")
        self.assertEqual(raised.exception.body["code"], "outcome-unknown")
        self.assertEqual(self.provider.generated, 1)

    def test_a_stream_is_passed_on_as_it_comes_and_replayed_piece_by_piece(self):
        self.serve("none")
        self.provider.paused.clear()
        stream = iter(self.ask("draft-1", stream=True))
        # The provider waits after its first event, and we have it.
        first = next(stream).choices[0].delta.content
        self.provider.paused.set()
        pieces = [first] + [chunk.choices[0].delta.content for chunk in stream]
        self.assertEqual("".join(pieces), "draft number 1 ")
        self.assertEqual(self.streamed("draft-1"), pieces)
        self.assertEqual(self.provider.requests, 1)

    def test_a_stream_that_breaks_off_is_unknown(self):
        self.serve("none")
        self.provider.cut_after = 2
        with self.assertRaises(Exception):
            self.streamed("draft-1")
        self.assertEqual(self.ledger.operation("draft-1")["state"], "needs_reconciliation")
        with self.assertRaises(openai.ConflictError):
            self.streamed("draft-1")
        self.assertEqual(self.provider.requests, 1)

    def test_a_stream_that_its_reader_leaves_is_stored_to_its_end(self):
        self.serve("none")
        stream = self.ask("draft-1", stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: self.ledger.operation("draft-1")["state"] == "succeeded", "the end of the stream")
        self.assertEqual("".join(self.streamed("draft-1")), "draft number 1 ")
        self.assertEqual(self.provider.requests, 1)


if __name__ == "__main__":
    unittest.main()
