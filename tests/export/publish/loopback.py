"""A hub on this machine: the endpoints of huggingface.co that publishing and loading a model use, over real HTTP."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "Wr1teTokenOfTheLoopbackHub0123456"
ME = "ada"
CUT = "cut"


@dataclass
class Repo:
    """A repository: branches of files, each a history of commits."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"*.x lfs\n"}})
    commits: list[dict] = field(default_factory=list)

    def sha(self, branch: str) -> str:
        content = sorted((name, git_hash(data)) for name, data in self.branches[branch].items())
        return hashlib.sha1(repr((branch, content, len(self.commits))).encode()).hexdigest()


class Hub:
    """The server, its state, and what is to go wrong.

    Attributes:
        requests: method and route (``POST commit``) of everything that was asked, in order.
        faults: for a method and route what to answer instead, once each: a status with headers and message, or ``CUT``.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.storage: dict[str, bytes] = {}
        self.bases = {"ibm-granite/granite-4.0-h-1b"}
        self.role = "write"
        self.requests: list[str] = []
        self.faults: dict[str, list] = {}
        self.before_commit: Callable[[], None] = lambda: None
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        poll = {"poll_interval": 0.01}  # which a test waits for at its end
        threading.Thread(target=self._server.serve_forever, kwargs=poll, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, route: str, status: int | str, times: int = 1, **headers: str) -> None:
        """Answer the next requests of a route with an error."""
        self.faults.setdefault(route, []).extend([(status, headers)] * times)

    def count(self, route: str) -> int:
        return self.requests.count(route)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".png"))


# A route's name, its method, and its path.
_ROUTES = [
    ("whoami", "GET", r"/api/whoami-v2"),
    ("create", "POST", r"/api/repos/create"),
    ("validate-yaml", "POST", r"/api/validate-yaml"),
    ("branch", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)"),
    ("preupload", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<branch>[^/]+)"),
    ("commit", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<branch>[^/]+)"),
    ("tree", "GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<branch>[^/]+)(?:/.*)?"),
    ("info", "GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<branch>[^/]+))?"),
    ("batch", "POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("store", "PUT", r"/storage/(?P<oid>[0-9a-f]{64})"),
    ("file", "GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)"),
    ("file", "HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)"),
]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body of an answer are two packets

        def log_message(self, *_) -> None:
            pass

        def _serve(self) -> None:
            path = urlsplit(self.path).path
            for name, method, pattern in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method == self.command:
                    return self._answer(
                        name, {key: value and unquote(value) for key, value in match.groupdict().items()}
                    )
            self.close_connection = True
            self._error(404, f"no such endpoint: {self.command} {path}")

        do_GET = do_HEAD = do_POST = do_PUT = _serve

        def _answer(self, route: str, place: dict) -> None:
            hub.requests.append(f"{self.command} {route}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if waiting := hub.faults.get(f"{self.command} {route}"):
                status, headers = waiting.pop(0)
                self.close_connection = True
                if status != CUT:
                    # A careless server that repeats the token in its answer.
                    said = f"as told to for {self.headers.get('Authorization', 'nobody')}"
                    self._error(status, said, **{key.replace("_", "-"): value for key, value in headers.items()})
                return None  # without an answer the connection just ends
            allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if route not in ("store", "file") and not allowed:  # storage goes by the signature in its address
                return self._error(401, "Invalid credentials in Authorization header")
            return getattr(self, "_" + route.replace("-", "_"))(body, **{k: v for k, v in place.items() if v})

        def _json(self, value, status: int = 200, **headers: str) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            for key, entry in {"Content-Type": "application/json", **headers}.items():
                self.send_header(key, entry)
            if self.close_connection:  # unannounced, a client would send its next request into a closing connection
                self.send_header("Connection", "close")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _error(self, status: int, message: str, **headers: str) -> None:
            self._json({"error": message}, status, **headers)

        def _missing(self) -> None:
            self._error(404, "Repository not found", **{"X-Error-Code": "RepoNotFound"})

        def _whoami(self, _) -> None:
            self._json({"name": ME, "type": "user", "orgs": [], "auth": {"accessToken": {"role": hub.role}}})

        def _info(self, _, repo: str, branch: str = "main") -> None:
            if repo in hub.bases:
                return self._json({"id": repo, "sha": "0" * 40, "private": False, "siblings": [], "tags": []})
            if repo not in hub.repos:
                return self._missing()
            found = hub.repos[repo]
            if branch not in found.branches:
                return self._error(404, "no such branch", **{"X-Error-Code": "RevisionNotFound"})
            names = [{"rfilename": name} for name in found.branches[branch]]
            about = {"id": repo, "sha": found.sha(branch), "private": found.private, "siblings": names, "tags": []}
            return self._json(about)

        def _create(self, body: bytes) -> None:
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            if repo in hub.repos:
                return self._error(409, "You already created this model repo")
            if wanted["organization"] != ME:
                return self._error(403, f"You don't have the rights to create a model under {wanted['organization']}")
            private = wanted.get("visibility") == "private" or wanted.get("private") is True
            hub.repos[repo] = Repo(private)
            return self._json({"url": f"{hub.url}/{repo}"})

        def _branch(self, _, repo: str, branch: str) -> None:
            branches = hub.repos[repo].branches
            if branch in branches:
                return self._error(409, "Reference already exists")
            branches[branch] = dict(branches["main"])
            return self._json({})

        def _entry(self, name: str, content: bytes) -> dict:
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            if is_lfs(name):
                oid = hashlib.sha256(content).hexdigest()
                pointer = (
                    f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()
                )
                entry |= {
                    "oid": git_hash(pointer),
                    "lfs": {"oid": oid, "size": len(content), "pointerSize": len(pointer)},
                }
            return entry

        def _tree(self, _, repo: str, branch: str) -> None:
            found = hub.repos.get(repo)
            return (
                self._json([self._entry(name, data) for name, data in found.branches[branch].items()])
                if found
                else self._missing()
            )

        def _validate_yaml(self, body: bytes) -> None:
            content = json.loads(body)["content"]
            if not content.startswith("---\n") or "license: apache-2.0" not in content:
                return self._json({"errors": [{"message": '"license" must be one of [apache-2.0]'}]}, 400)
            return self._json({"errors": [], "warnings": []})

        def _preupload(self, body: bytes, repo: str, branch: str) -> None:
            files = hub.repos[repo].branches[branch]
            answers = []
            for file in json.loads(body)["files"]:
                name = file["path"]
                assert len(base64.b64decode(file["sample"])) == min(512, file["size"])
                there = self._entry(name, files[name]) if name in files else {}
                oid = there.get("lfs", there).get("oid")
                mode = "lfs" if is_lfs(name) else "regular"
                answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self._json({"files": answers})

        def _batch(self, body: bytes, repo: str) -> None:
            objects = []
            for wanted in json.loads(body)["objects"]:
                href = f"{hub.url}/storage/{wanted['oid']}?X-Amz-Signature=permission-to-write"
                actions = {} if wanted["oid"] in hub.storage else {"actions": {"upload": {"href": href}}}
                objects.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
            self._json({"transfer": "basic", "objects": objects})

        def _store(self, body: bytes, oid: str) -> None:
            if hashlib.sha256(body).hexdigest() != oid:
                return self._error(400, "not the content that was announced")
            hub.storage[oid] = body
            return self._json({})

        def _commit(self, body: bytes, repo: str, branch: str) -> None:
            hub.before_commit()
            found = hub.repos[repo]
            header, *operations = [json.loads(line) for line in body.splitlines()]
            if header["value"].get("parentCommit") not in (None, found.sha(branch)):
                return self._error(412, "A commit has happened since. Please refresh and try again.")
            files = dict(found.branches[branch])
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "deletedFile":
                    del files[value["path"]]
                else:
                    if value["oid"] not in hub.storage:
                        return self._error(400, f"{value['path']}: its content was never stored")
                    files[value["path"]] = hub.storage[value["oid"]]
            found.branches[branch] = files
            found.commits.append({"branch": branch, "summary": header["value"]["summary"], "files": len(operations)})
            sha = found.sha(branch)
            return self._json({"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

        def _file(self, _, repo: str, branch: str, name: str) -> None:
            found = hub.repos.get(repo)
            if found is None:
                return self._missing()
            branch = branch if branch in found.branches else "main"  # a commit of main, as far as it goes here
            if name not in found.branches[branch]:
                return self._error(404, "Entry not found", **{"X-Error-Code": "EntryNotFound"})
            content = found.branches[branch][name]
            self.send_response(200)
            self.send_header("ETag", f'"{git_hash(content)}"')
            self.send_header("X-Repo-Commit", found.sha(branch))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            return None

    return Handler
