"""How engines write what they say: as vLLM does, or as others, or what stands before one."""

import json
from dataclasses import dataclass

EVENTS, JSON = b"text/event-stream; charset=utf-8", b"application/json"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n"


def _backwards(pairs):
    return dict(reversed(pairs))


@dataclass(frozen=True)
class Style:
    """vLLM's, if nothing else is said."""

    separators: tuple = (",", ":")
    members: object = dict  # an object of its pairs
    data: bytes = b"data: "
    end: bytes = b"\n"  # of a line of a stream
    closes: bool = False  # the end of an answer is that of its connection
    types: tuple = (EVENTS, JSON)
    before: bytes = b""  # stands before each head
    trailer: bytes = b""  # lines behind the last chunk

    def json(self, value):
        said = json.loads(json.dumps(value), object_pairs_hook=self.members)
        return json.dumps(said, separators=self.separators, ensure_ascii=False).encode()

    def event(self, event):
        """Return one that vLLM has written."""
        before, _, said = event.partition(b"data: ")
        if said.startswith(b"{"):
            said = self.json(json.loads(said)) + b"\n\n"
        return (before + self.data + said).replace(b"\n", self.end)

    def whole(self, status, answer):
        """Return the pieces of an answer that is no stream."""
        body = self.json(answer)
        return [self._head(status, b"content-length: %d" % len(body)) + body]

    def stream(self, events):
        """Return the pieces of a stream, head first."""
        head = self._head(200, b"transfer-encoding: chunked", streams=True)
        written = list(map(self.event, events))
        if self.closes:
            return [head, *written]
        return [head, *(b"%x\r\n%b\r\n" % (len(each), each) for each in written), b"0\r\n%b\r\n" % self.trailer]

    def _head(self, status, framing, *, streams=False):
        framing = b"connection: close" if self.closes else framing
        stream, whole = self.types
        type_ = stream if streams else whole
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n%b\r\n\r\n"
        return self.before + head % (status, b"OK" if status == 200 else b"No", type_, framing)


STYLES = {
    "vLLM": Style(),
    "spaces": Style(separators=(", ", ": ")),
    "no space behind data": Style(data=b"data:"),
    "carriage returns": Style(end=b"\r\n"),
    "backwards": Style(members=_backwards),
    "no length": Style(closes=True),
}


def drawn_style(dice):
    """Draw vLLM's, or all of another one's habits."""
    if dice.random() < 0.5:
        return Style()
    return Style(
        separators=dice.choice(((",", ":"), (", ", ": "))),
        members=dice.choice((dict, _backwards)),
        data=dice.choice((b"data: ", b"data:")),
        end=dice.choice((b"\n", b"\r\n")),
        closes=dice.random() < 0.3,
        types=dice.choice(((EVENTS, JSON), (b"text/event-stream", b"application/json; charset=utf-8"))),
        before=dice.choice((b"", b"", HINTS)),
        trailer=dice.choice((b"", b"", b"server-timing: total\r\n")),
    )
