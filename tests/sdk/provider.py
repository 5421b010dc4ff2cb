"""A small server that speaks as much of OpenAI's API as the tests need, remembers keys, and counts what it generated."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Provider:
    def __init__(self):
        self.lock = threading.Lock()
        self.paused = threading.Event()
        self.forget()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                try:
                    provider.answer(self)
                except ConnectionError:
                    # A ledger that was killed reads no more.
                    self.close_connection = True

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def forget(self):
        """As if it were new."""
        self.generated = 0
        self.requests = 0
        self.authorizations = []
        self.remembered = {}
        # Set to stop in the middle of a stream.
        self.cut_after = None
        self.paused.set()

    def close(self):
        self.paused.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        key = handler.headers.get("Idempotency-Key")
        with self.lock:
            self.requests += 1
            self.authorizations.append(handler.headers.get("Authorization"))
            text = self.remembered.get(key) if key else None
            if text is None:
                self.generated += 1
                text = f"draft number {self.generated}"
                if key:
                    self.remembered[key] = text
        if json.loads(body).get("stream"):
            self.stream(handler, text)
        else:
            self.whole(handler, text)

    def whole(self, handler, text):
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        document = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        body = json.dumps(document).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("x-request-id", "req-of-provider")
        handler.end_headers()
        handler.wfile.write(body)

    def stream(self, handler, text):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        words = text.split(" ")
        for number, word in enumerate(words):
            if number == self.cut_after:
                handler.wfile.flush()
                handler.connection.close()
                handler.close_connection = True
                return
            choice = {"index": 0, "delta": {"content": word + " "}, "finish_reason": None}
            event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.chunk(handler, f"data: {json.dumps(event)}\n\n")
            self.paused.wait()
            time.sleep(0.02)
        self.chunk(handler, "data: [DONE]\n\n")
        handler.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def chunk(handler, text):
        handler.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        handler.wfile.flush()
