"""A web server on a free loopback port that breaks connections in the middle of files, and a stand-in for the hub."""

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FlakyServer:
    """Serves `files` (path: content), answering range requests; use as a context manager.

    Every `drop_every`-th answer with content (0: none) is broken off after a third of it, and `busy` answers are refused
    with 503 first. `away`: every connection is closed without an answer. `asked` counts ranges by path; `sent` bytes.
    """

    def __init__(self, files, *, drop_every=0, busy=0, ranges=True):
        self.files, self.drop_every, self.busy, self.ranges = dict(files), drop_every, busy, ranges
        self.away = False
        self.answers = self.drops = 0
        self.asked, self.sent = Counter(), Counter()
        self.unknown, self.log = [], []
        server = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_):
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def leaves(self, path) -> bool:
        """Whether the server goes away for good when `path` is asked for; tests replace it."""
        return False

    def answer(self, request) -> None:
        request.close_connection = True
        path = unquote(urlsplit(request.path).path)
        self.log.append(f"{request.command} {request.path}")
        self.away = self.away or self.leaves(path)
        if self.away:
            request.connection.close()
            return
        if self.busy:
            self.busy -= 1
            request.send_response(503)
            request.end_headers()
            return
        content = self.files.get(path)
        if content is None:
            self.not_a_file(request, path)
            return
        self.send_file(request, path, content)

    def not_a_file(self, request, path) -> None:
        self.unknown.append(path)
        request.send_response(404)
        request.end_headers()

    def send_file(self, request, path, content, **headers) -> None:
        """The whole file or the range that was asked for, or a third of it."""
        span = request.headers.get("Range")
        if span and self.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            low, high = int(first), min(int(last or len(content) - 1), len(content) - 1) + 1
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {low}-{high - 1}/{len(content)}")
        else:
            low, high = 0, len(content)
            request.send_response(200)
        body = content[low:high]
        if isinstance(self, FlakyHub):
            headers["X-Repo-Commit"] = self.COMMIT
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Content-Length": str(len(body))} | headers
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if len(body) > 1:
            self.asked[path] += 1
            self.answers += 1
            if self.drop_every and self.answers % self.drop_every == 0:
                self.drops += 1
                body = body[: -(-len(body) // 3)]
        self.sent[path] += len(body)
        request.wfile.write(body)


class FlakyHub(FlakyServer):
    """The few routes that `huggingface_hub` asks for one public dataset `name` of `files` (name: content)."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, name, files, **options):
        self.name, self.of_dataset = name, dict(files)
        super().__init__({}, **options)
        self.publish(self.COMMIT)

    def publish(self, commit) -> None:
        """Make `commit` the newest one, with the same files."""
        self.COMMIT = commit
        for file, content in self.of_dataset.items():
            self.files[f"/datasets/{self.name}/resolve/{commit}/{file}"] = content

    def not_a_file(self, request, path) -> None:
        api = f"/api/datasets/{self.name}"
        if path == f"{api}/auth-check":
            self.send_json(request, {})
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{self.COMMIT}"):
            siblings = [{"rfilename": file} for file in self.of_dataset]
            about = {"id": self.name, "sha": self.COMMIT, "siblings": siblings, "private": False, "gated": False}
            self.send_json(request, about | {"tags": [], "downloads": 0, "likes": 0, "disabled": False})
        elif path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            self.send_json(request, self.entries(request, path))
        else:
            self.unknown.append(path)
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound")
            request.end_headers()

    def entries(self, request, path):
        if "/paths-info/" in path:
            body = request.rfile.read(int(request.headers["Content-Length"])).decode()
            kind = request.headers.get("Content-Type", "")
            wanted = (
                json.loads(body)["paths"] if "json" in kind else [unquote(p.split("=")[1]) for p in body.split("&")]
            )
            files = {file: content for file, content in self.of_dataset.items() if file in wanted}
            return [self.entry(*file) for file in files.items()]
        below = path.split("/tree/")[1].partition("/")[2]
        prefix = below + "/" if below else ""
        there = {file: content for file, content in self.of_dataset.items() if file.startswith(prefix)}
        if "recursive=true" in request.path.lower():
            return [self.entry(file, content) for file, content in there.items()]
        direct = [self.entry(file, content) for file, content in there.items() if "/" not in file.removeprefix(prefix)]
        inside = sorted({prefix + file.removeprefix(prefix).split("/")[0] for file in there} - set(there))
        return direct + [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in inside]

    def entry(self, file, content):
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send_json(self, request, value) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
