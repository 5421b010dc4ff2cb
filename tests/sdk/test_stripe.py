"""Stripe's SDK, unchanged but for its base URL and key, in front of localstripe, which ignores keys."""

import subprocess
import sys
import threading
import unittest

import stripe

from support import Gate, Ledger, free_port, keys_in, listens, wait_until

STRIPES_KEY = "sk_test_12345"

CONFIG = """
[recovery]
heartbeat = "500ms"
lease = "2s"
sweep = "500ms"

[downstreams.stripe]
url = "http://127.0.0.1:{port}"
credential = {{ bearer_env = "STRIPES_KEY" }}

[[downstreams.stripe.routes]]
path = "/v1/**"
idempotency = "none"

[downstreams.nobody]
url = "http://127.0.0.1:{nobody}"
"""


class Stripe(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.port = free_port()
        command = [sys.executable, "-m", "localstripe", "--port", str(cls.port), "--from-scratch"]
        localstripe = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cls.addClassCleanup(localstripe.wait)
        cls.addClassCleanup(localstripe.terminate)
        wait_until(lambda: listens(cls.port), "localstripe")
        # Before localstripe, so that its answers can be held back.
        cls.back = Gate(cls.port)
        cls.addClassCleanup(cls.back.close)
        config = CONFIG.format(port=cls.back.port, nobody=free_port())
        cls.ledger = Ledger(config, {"STRIPES_KEY": STRIPES_KEY})
        cls.addClassCleanup(cls.ledger.stop)
        # Before the ledger, likewise.
        cls.front = Gate(cls.ledger.port)
        cls.addClassCleanup(cls.front.close)

    def setUp(self):
        # The ledger and localstripe are the same for all, so every test has customers and ids of its own.
        self.back.forget()
        self.front.forget()

    def client(self, retries=0, downstream="stripe"):
        base = f"http://127.0.0.1:{self.front.port}/v1/proxy/{downstream}"
        return stripe.StripeClient(self.ledger.key, base_addresses={"api": base}, max_network_retries=retries)

    def create(self, key, email, retries=0):
        return self.client(retries).v1.customers.create({"email": email}, {"idempotency_key": key})

    def stored(self, email):
        """What localstripe has, asked directly."""
        direct = stripe.StripeClient(STRIPES_KEY, base_addresses={"api": f"http://127.0.0.1:{self.port}"})
        return [customer for customer in direct.v1.customers.list({"limit": 100}).data if customer.email == email]

    def test_without_us_two_equal_creates_make_two_customers(self):
        direct = stripe.StripeClient(STRIPES_KEY, base_addresses={"api": f"http://127.0.0.1:{self.port}"})
        for _ in range(2):
            direct.v1.customers.create({"email": "direct@example.com"}, {"idempotency_key": "direct"})
        self.assertEqual(len(self.stored("direct@example.com")), 2)

    def test_through_us_they_make_one(self):
        first = self.create("customer-1", "one@example.com")
        again = self.create("customer-1", "one@example.com")
        self.assertEqual(first.id, again.id)
        self.assertEqual(again.last_response.headers.get("Idempotent-Replayed"), "true")
        self.assertEqual([customer.id for customer in self.stored("one@example.com")], [first.id])
        listed = self.client().v1.customers.list({"limit": 100})
        self.assertIn(first.id, [customer.id for customer in listed.data])

    def test_another_customer_under_the_same_key_is_refused(self):
        self.create("customer-2", "two@example.com")
        with self.assertRaises(stripe.APIError) as raised:
            self.create("customer-2", "other@example.com")
        self.assertEqual(raised.exception.http_status, 422)
        self.assertEqual(raised.exception.json_body["code"], "fingerprint-mismatch")
        self.assertEqual(self.back.sent.count(b"POST /v1/customers "), 1)
        self.assertEqual(self.stored("other@example.com"), [])

    def test_left_alone_the_sdk_makes_up_a_key_for_each_call_and_its_retries(self):
        # Nobody is reached, so nothing is stored, and the SDK tries again.
        for _ in range(2):
            with self.assertRaises(stripe.APIError) as raised:
                self.client(2, "nobody").v1.customers.create({"email": "nobody@example.com"})
            self.assertEqual(raised.exception.http_status, 502)
            self.assertEqual(raised.exception.json_body["code"], "downstream-unreachable")
        keys = keys_in(self.front.sent)
        self.assertEqual([len(keys), len(set(keys))], [6, 2])
        self.assertEqual(len(set(keys[:3])), 1)

    def test_a_call_that_is_only_accepted_has_no_customer_yet(self):
        options = {"idempotency_key": "customer-6", "headers": {"Prefer": "respond-async"}}
        accepted = self.client().v1.customers.create({"email": "six@example.com"}, options)
        # The SDK takes it for a success.
        self.assertEqual(accepted.last_response.code, 202)
        self.assertNotIn("id", accepted)
        wait_until(lambda: self.ledger.operation("customer-6")["state"] == "succeeded", "the customer")
        self.assertEqual([self.create("customer-6", "six@example.com").id], [c.id for c in self.stored("six@example.com")])

    def test_a_refusal_of_the_vendors_is_an_answer_and_is_replayed(self):
        for _ in range(2):
            with self.assertRaises(stripe.InvalidRequestError):
                self.client().v1.charges.create({"amount": -1, "currency": "eur"}, {"idempotency_key": "charge-1"})
        self.assertEqual(self.back.sent.count(b"POST /v1/charges"), 1)

    def test_keys_stay_on_their_side(self):
        self.create("customer-3", "three@example.com")
        self.assertNotIn(self.ledger.key.encode(), self.back.sent)
        self.assertIn(STRIPES_KEY.encode(), self.back.sent)
        self.assertNotIn(STRIPES_KEY.encode(), self.front.received)

    def test_the_sdks_own_retries_find_the_first_answer_after_a_crash(self):
        made = []
        self.front.shut()
        call = threading.Thread(target=lambda: made.append(self.create("customer-4", "four@example.com", retries=8)))
        call.start()
        # The answer is stored, and lost with the connection.
        wait_until(lambda: b"four@example.com" in self.front.received, "the ledger's answer")
        self.ledger.kill()
        self.ledger.start()
        self.front.reopen()
        call.join(60)
        self.assertEqual([customer.email for customer in made], ["four@example.com"])
        self.assertEqual(len(self.stored("four@example.com")), 1)

    def test_what_nobody_knows_is_said_and_not_done_again(self):
        self.back.shut()
        failures = []

        def create():
            try:
                self.create("customer-5", "five@example.com", retries=3)
            except stripe.StripeError as failure:
                failures.append(failure)

        call = threading.Thread(target=create)
        call.start()
        wait_until(lambda: b"five@example.com" in self.back.received, "the vendor's answer")
        self.ledger.kill()
        self.back.reopen()
        self.ledger.start()
        # The SDK's own retries met the ledger again, and were not told that it is done, nor that it is not.
        call.join(60)
        self.assertEqual([failure.http_status for failure in failures], [409])
        wait_until(lambda: self.ledger.operation("customer-5")["state"] == "needs_reconciliation", "recovery")
        with self.assertRaises(stripe.APIError) as raised:
            self.create("customer-5", "five@example.com")
        self.assertEqual(raised.exception.http_status, 409)
        self.assertEqual(raised.exception.json_body["code"], "outcome-unknown")
        self.assertEqual(self.back.sent.count(b"POST /v1/customers "), 1)
        self.assertEqual(len(self.stored("five@example.com")), 1)


if __name__ == "__main__":
    unittest.main()
