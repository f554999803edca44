"""HTML that can't be broken out of (text becomes markup in `element` alone, and there it is escaped), and the page's
style.

Every state and mark has a shape of its own as well as a colour: no one needs the colours.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape

from hpc_elastic.base.text import duration as _duration
from hpc_elastic.base.text import local_time, ranks_text, safe_text, time_text
from hpc_elastic.slurm.notation import HostlistError, compress

duration = partial(_duration, fine=True)
ranks = partial(ranks_text, limit=60)


def clock_time(when_ns: int | None, *, fine: bool = False) -> str:
    """``2026-11-21 05:30:00``, local time where the page is made."""
    return time_text(when_ns, fine=fine, separator=" ") if when_ns else "?"


def time_of_day(when_ns: int | None, *, fine: bool = False) -> str:
    """``05:30:00``."""
    return time_text(when_ns, date=False, fine=fine) if when_ns else "?"


def zone(when_ns: int | None) -> str:
    """``UTC+02:00``: what the page's times are to be read as."""
    moment = local_time(when_ns)
    offset = moment.astimezone().strftime("%z") if moment is not None else ""
    return f"UTC{offset[:3]}:{offset[3:5]}" if offset else "local time"


def names(hosts: Sequence[str], *, limit: int = 60) -> str:
    """``n[1-4,6]``."""
    try:
        shown = compress(dict.fromkeys(hosts))
    except HostlistError:
        shown = ",".join(hosts)
    return shorten(shown, limit)


def shorten(value: str, limit: int) -> str:
    """At most so many characters."""
    return value if len(value) <= limit else f"{value[: limit - 1]}\u2026"


_VOID = frozenset({"meta", "input", "wbr"})
_EMPTY = frozenset({"path", "use"})


class Markup(str):
    """HTML source, made by this module's functions."""

    __slots__ = ()


def text(value: str) -> Markup:
    """Foreign text as HTML, for content and for attributes alike."""
    return Markup(escape(safe_text(value), quote=True))


def element(name: str, /, *content: str, **attributes: str | bool | None) -> Markup:
    """One element.

    Args:
        name: The tag's name.
        content: Markup is taken as it is, any other text is escaped.
        attributes: ``_`` stands for ``-``, a ``_`` at the end is left out (``class_``); True: without a value; False,
            None: not there.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{_source(str(value))}"')
    if name in _EMPTY:  # SVG's
        return Markup("".join([*parts, "/>"]))
    parts.append(">")
    if name in _VOID:
        return Markup("".join(parts))
    parts += [_source(piece) for piece in content]
    parts.append(f"</{name}>")
    return Markup("".join(parts))


def table(columns: Sequence[str], rows: Sequence[Markup], *, numbers: Sequence[str] = ()) -> Markup:
    """A table that scrolls sideways; `numbers` are the columns that are flush right."""
    cells = (element("th", name, scope="col", class_="n" if name in numbers else None) for name in columns)
    return element("div", element("table", element("tr", *cells), *rows), class_="scroll")


def card(title: str, *content: str, label: str = "") -> Markup:
    """One part of the page under its title."""
    return element("section", element("h2", title), *content, class_="card", aria_label=label or title)


def fact_list(facts: Iterable[tuple[str, str]]) -> Markup:
    """Names, each with its value."""
    pairs = (join(element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", *pairs, class_="facts")


def join(*pieces: str) -> Markup:
    """One after the other."""
    return Markup("".join(_source(piece) for piece in pieces))


def _source(piece: str) -> str:
    return piece if isinstance(piece, Markup) else text(piece)


def page(title: str, body: Markup, *, rules: str = "") -> str:
    """A whole page, in which nothing but its one style sheet, with these rules in it, may act."""
    style = f"{stylesheet()}{rules}\n"
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # style-src is for browsers that don't know the two others. Places on the axis are style attributes.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"style-src-elem 'sha256-{digest}'; style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


LIGHT: Mapping[str, str] = {
    "page": "#f4f5f7",
    "card": "#ffffff",
    "line": "#d5d9e0",
    "text": "#1a1f29",
    "muted": "#555e6d",
    "link": "#1455a8",
    "code": "#f0f2f5",
    "good": "#1b6e33",
    "bad": "#b3201a",
    "warn": "#8a5200",
    "running": "#2f6db5",
    "starting": "#2b8a9e",
    "stopping": "#b3620a",
    "rendezvous": "#9a7000",
    "spare": "#75759a",
    "launching": "#868d9a",
    "done": "#2c8a4b",
    "lost": "#b3201a",
    "cause": "#b3201a",
    "hang": "#7a3aa8",
    "symptom": "#9a5b00",
    "stopped": "#6a7280",
    "round": "#8b93a1",
    "attempt": "#1a1f29",
}
DARK: Mapping[str, str] = {
    "page": "#0f1216",
    "card": "#181c22",
    "line": "#343b46",
    "text": "#e6e9ee",
    "muted": "#a3acb9",
    "link": "#8ab8f5",
    "code": "#11151a",
    "good": "#6cc784",
    "bad": "#ff8a80",
    "warn": "#e8b04f",
    "running": "#5b96dc",
    "starting": "#55bccf",
    "stopping": "#ef9d4a",
    "rendezvous": "#d9b13c",
    "spare": "#9a9ac4",
    "launching": "#838b99",
    "done": "#58b877",
    "lost": "#ff6f63",
    "cause": "#ff6f63",
    "hang": "#c894f0",
    "symptom": "#e8a23a",
    "stopped": "#a3acb9",
    "round": "#6b7482",
    "attempt": "#e6e9ee",
}


def stylesheet() -> str:
    """The page's one style sheet. It names no address."""
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n{_RULES}"
    )


def _variables(palette: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in palette.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:1500px;margin:0 auto;padding:1.5rem 1.5rem 4rem}
h1{font-size:1.45rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 .7rem}
h3{font-size:1.05rem;margin:0;overflow-wrap:anywhere}
p{margin:.3rem 0}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.87em}
pre{margin:.5rem 0 0;padding:.8rem 1rem;background:var(--code);border:1px solid var(--line);border-radius:6px;
overflow:auto;max-height:24rem;line-height:1.45;white-space:pre;tab-size:4}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.muted{color:var(--muted)}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1.1rem 1.3rem;margin:1rem 0}
header.top{display:flex;flex-wrap:wrap;gap:.4rem 1rem;align-items:center}
header.top p{flex-basis:100%;margin:0;overflow-wrap:anywhere}
.chip{display:inline-block;padding:.1rem .7rem;border-radius:1rem;border:2px solid;font-weight:650;font-size:.9rem}
.chip.good{color:var(--good)}.chip.bad{color:var(--bad)}.chip.warn{color:var(--warn)}
.verdict{border-left:6px solid var(--bad)}
.verdict.good{border-left-color:var(--good)}
.verdict .what{font-size:1.2rem;font-weight:650;line-height:1.35;margin:.1rem 0 .5rem;overflow-wrap:anywhere}
.verdict .label{color:var(--muted);font-size:.85rem;font-weight:650;letter-spacing:.02em}
dl.facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15rem 1.1rem;margin:.5rem 0}
dl.facts dt{color:var(--muted)}
dl.facts dd{margin:0;overflow-wrap:anywhere}
details>summary{cursor:pointer;font-weight:600;margin-top:.5rem;width:max-content;max-width:100%}
ul.plain{list-style:none;margin:.3rem 0 0;padding:0}
ul.plain li{margin:.15rem 0;overflow-wrap:anywhere}
.goodput{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.4rem 1.8rem;align-items:center}
.goodput .number{font-size:2.3rem;font-weight:700;line-height:1;font-variant-numeric:tabular-nums}
.share{display:flex;height:1.5rem;border-radius:5px;overflow:hidden;border:1px solid var(--line);background:var(--code)}
.share i{display:block;height:100%;border-right:1px solid var(--card)}
.parts{grid-column:1/-1;display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:.2rem 0 0;padding:0;list-style:none}
.parts i,.legend i.swatch{display:inline-block;width:1rem;height:.8rem;border-radius:2px;margin-right:.4rem;
vertical-align:-.05rem;border:1px solid var(--line)}
.f-training{background:var(--running)}
.f-starting{background:repeating-linear-gradient(90deg,var(--starting) 0 4px,var(--card) 4px 6px)}
.f-interrupted{background:repeating-linear-gradient(135deg,var(--stopping) 0 4px,var(--card) 4px 6px)}
.f-recomputed{background:repeating-linear-gradient(45deg,var(--symptom) 0 5px,var(--card) 5px 7px)}
.f-hanging{background:repeating-linear-gradient(0deg,var(--hang) 0 2px,var(--card) 2px 4px)}
.f-checkpointing{background:repeating-linear-gradient(90deg,var(--done) 0 3px,var(--card) 3px 5px)}
.f-queued{background:repeating-linear-gradient(45deg,var(--spare) 0 2px,var(--card) 2px 6px)}
.f-ending{background:repeating-linear-gradient(0deg,var(--done) 0 3px,var(--card) 3px 5px)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--muted);font-size:.87rem;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
td.w{white-space:nowrap}
td.who{min-width:8rem;max-width:20rem;overflow-wrap:anywhere}
td.wide{overflow-wrap:anywhere;min-width:10rem;width:100%}
tr:last-child td{border-bottom:0}
tr.group td{font-weight:650;border-bottom-width:2px;padding-top:.8rem}
button{font:inherit;color:inherit}
button.open{border:0;background:none;padding:0;color:var(--link);text-decoration:underline;cursor:pointer;
text-align:left;overflow-wrap:anywhere}
.toolbar{display:flex;flex-wrap:wrap;gap:.4rem 1.6rem;align-items:center;margin-bottom:.6rem}
.chartbox{display:block}
.chartbox>input{position:absolute;opacity:0;width:1px;height:1px}
.choices{display:flex;flex-wrap:wrap;gap:.5rem 1.5rem;margin:0 0 .7rem;font-size:.9rem}
.choices>span{display:inline-flex;align-items:center;gap:.3rem}
.choices label{border:1px solid var(--line);border-radius:6px;padding:.1rem .65rem;cursor:pointer;
background:var(--card)}
.view{display:none}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.2rem;margin:.8rem 0 0;padding:0;list-style:none;font-size:.86rem}
.legend svg{width:2.2rem;height:16px;vertical-align:-3px;margin-right:.4rem}
.legend .m,td .m{position:relative;margin:0 .5rem 0 0;vertical-align:-3px;cursor:default}
.legend .m.cause,td .m.cause{margin:-3px calc(.5rem - 3px) -3px -3px;vertical-align:-6px}
.chartscroll{--label:13rem;overflow:auto;max-height:82vh;border:1px solid var(--line);border-radius:6px;
background:var(--card);position:relative}
.chart{position:relative;width:calc(max(100%,54rem) * var(--zoom,1));padding-bottom:.5rem}
.axis,.row{display:grid;grid-template-columns:var(--label) minmax(0,1fr)}
.axis{position:sticky;top:0;z-index:5;background:var(--card);border-bottom:1px solid var(--line);font-size:.78rem;
line-height:1.2;color:var(--muted)}
.axis>span:first-child{position:sticky;left:0;z-index:2;background:var(--card);padding:.3rem .6rem;align-self:stretch;
display:flex;align-items:flex-end}
.axis .at{position:relative;height:3.9rem;margin-right:1.6rem}
.axis b,.axis em,.axis time{position:absolute;white-space:nowrap;font-style:normal;font-variant-numeric:tabular-nums}
.axis b{top:.3rem;color:var(--text);padding-left:.35rem}
.axis em{top:1.55rem;padding-left:.3rem}
.axis time{display:none;bottom:.2rem;transform:translateX(-50%)}
.axis time:after{content:"";position:absolute;left:50%;bottom:-.2rem;height:.2rem;border-left:1px solid var(--muted)}
.axis time.first{transform:none}.axis time.first:after{left:0}
.lines{position:absolute;left:var(--label);right:1.6rem;top:0;bottom:0;pointer-events:none;z-index:1}
.lines i{position:absolute;top:1.5rem;bottom:0;border-left:1px dashed var(--round)}
.lines i.a{top:.2rem;border-left:2px solid var(--attempt)}
.lines i.q{top:0;border:0;background:repeating-linear-gradient(45deg,var(--line) 0 1.5px,transparent 1.5px 8px)}
.rows{list-style:none;margin:0;padding:.3rem 0 0}
.row{align-items:center;min-height:26px}
.row:hover{background:var(--code)}
.row .name{position:sticky;left:0;z-index:4;background:var(--card);padding:0 .6rem;font-size:.84rem;align-self:stretch;
display:flex;align-items:center;gap:.45rem;min-width:0}
.row .name b{font-weight:600;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;flex:0 1 auto}
.row .name small{color:var(--muted);overflow:hidden;text-overflow:ellipsis;white-space:nowrap;flex:1 1 0;min-width:0}
.row .at{position:relative;height:100%;min-height:20px;margin-right:1.6rem;display:flex;align-items:center}
.row svg{width:100%;height:16px;display:block;overflow:visible}
.many .row{min-height:17px}.many .row .at{min-height:15px}.many .row svg{height:12px}.many .row .name{font-size:.75rem}
path{fill:none}
.s-r{stroke:var(--running);stroke-width:12}
.s-s{stroke:var(--starting);stroke-width:6}
.s-e{stroke:var(--stopping);stroke-width:6}
.s-v{stroke:var(--rendezvous);stroke-width:3}
.s-l{stroke:var(--launching);stroke-width:1.5}
.s-w{stroke:var(--spare);stroke-width:2}
.s-d{stroke:var(--done);stroke-width:2.5}
.s-x{stroke:var(--lost);stroke-width:2.5}
.s-g{stroke:var(--card);stroke-width:16}
.s-m{stroke:var(--symptom);stroke-width:16}
.m{position:absolute;z-index:2;width:16px;height:16px;margin-left:-8px;padding:0;border:0;background:none;cursor:pointer;
display:inline-block;border-radius:50%}
.row .m{top:50%;margin-top:-8px}
.many .row .m{width:13px;height:13px;margin:-6.5px 0 0 -6.5px}
.m:before{content:"";position:absolute;inset:0;background:var(--card);clip-path:var(--shape)}
.m:after{content:"";position:absolute;inset:1.5px;background:var(--tone);clip-path:var(--shape)}
.m:hover{z-index:4;transform:scale(1.25)}
.m:focus-visible{z-index:4;outline-offset:1px}
.m.cause{--shape:polygon(50% 0,100% 50%,50% 100%,0 50%);--tone:radial-gradient(circle,var(--card) 19%,var(--cause) 21%);
width:22px;height:22px;margin-left:-11px;z-index:3}
.row .m.cause{margin-top:-11px}
.many .row .m.cause{width:17px;height:17px;margin:-8.5px 0 0 -8.5px}
.m.failure{--shape:circle(50%);--tone:var(--cause)}
.m.lost{--shape:polygon(22% 0,50% 28%,78% 0,100% 22%,72% 50%,100% 78%,78% 100%,50% 72%,22% 100%,0 78%,28% 50%,0 22%);
--tone:var(--lost)}
.m.hang{--shape:polygon(5% 0,95% 0,60% 50%,95% 100%,5% 100%,40% 50%);--tone:var(--hang)}
.m.infrastructure{--shape:polygon(25% 3%,75% 3%,100% 50%,75% 97%,25% 97%,0 50%);--tone:var(--hang)}
.m.symptom{--shape:polygon(50% 4%,100% 94%,0 94%);--tone:var(--symptom)}
.m.stopped{--shape:inset(18%);--tone:var(--stopped)}
[popover].entry{width:min(60rem,calc(100vw - 2rem));max-height:85vh;margin:auto;inset:0;position:fixed;overflow:auto;
padding:1.2rem 1.4rem;border:1px solid var(--line);border-radius:10px;background:var(--card);color:var(--text);
box-shadow:0 10px 40px #0006}
[popover].entry:not(:popover-open){display:none}
.entry:focus-visible{outline:none}
[popover]::backdrop{background:#0007}
.entry .head{display:flex;gap:1rem;justify-content:space-between;align-items:flex-start}
.entry .close{border:1px solid var(--line);background:var(--code);border-radius:6px;padding:.15rem .7rem;cursor:pointer}
.entry pre{max-height:45vh}
.vh{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
@media (max-width:700px){main{padding:.8rem}.chartscroll{--label:7rem}.goodput{grid-template-columns:1fr}
dl.facts{grid-template-columns:1fr}dl.facts dd{margin-bottom:.3rem}}
@media screen and (max-width:700px){.scroll table,.scroll tr{display:block}.scroll th{display:none}
.scroll tr{border-bottom:1px solid var(--line);padding:.35rem 0}.scroll tr:last-child{border-bottom:0}
.scroll td{display:inline;border:0;padding:0;white-space:normal;overflow-wrap:anywhere}
.scroll td+td:before{content:" \\00b7  ";color:var(--muted)}.scroll td.round:before{content:"round "}
.scroll td[data-name]:before{content:" \\00b7  " attr(data-name) " "}}
@media (forced-colors:active){.m,.share i,.parts i,.lines i,svg{forced-color-adjust:none}}
@media print{
@page{margin:12mm}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{background:#fff;font-size:10pt}
main{max-width:none;padding:0}
.card{break-inside:auto;padding:.5rem .8rem;margin:.5rem 0}
.choices,.close,.screen{display:none!important}
.chartscroll{overflow:visible;max-height:none;--label:8.5rem}
.chart{width:100%!important}.axis time{display:none!important}.axis time.t1{display:block!important}
.axis{position:relative}.row .name,.axis>span:first-child{position:static}
.row,tr,.legend{break-inside:avoid}
pre{max-height:none;white-space:pre-wrap;overflow-wrap:anywhere;overflow:visible;font-size:8pt}
.entries{display:block}
[popover].entry,[popover].entry:not(:popover-open){display:block;position:static;width:auto;max-height:none;overflow:visible;
box-shadow:none;margin:.5rem 0;inset:auto}
button.open{color:inherit;text-decoration:none}
}
@media screen{.entries>h2{display:none}}
"""
