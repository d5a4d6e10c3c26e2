"""Texts that tokenizers and detokenizers get wrong."""

from __future__ import annotations

NASTY_TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "   three spaces before",
    "three after   ",
    "a  b   c    d",
    "\n",
    "\n\n \n\t\r\n x",
    "tab\tand\u00a0no-break\u3000ideographic\u200bzero\ufeffbom",
    "I'll, WE'VE, it's; don'T 'S",
    "1 22 333 4444 12,345.67 ½ ⅷ ٣ 10²",
    "camelCase HTTPServer ÉCOLE élan ǅ",
    "def f(x):\n    return x ** 2  # comment\n\n",
    "naïve café — “quotes” … £5",
    "日本語のテキスト、한국어, العربية, हिन्दी, ไทย",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 a\u0308\u0323 é",
    "\U0001f9ff\U00020000\U0010fffd",
    "\x00\x01\x7f\x80 control",
    "▁ low one ▁▁ eighth <0x0A> <unk> \ufffd",
    "!?…()[]{}<>/\\|`~^$+=@#%&*_-",
    "a" * 300,
    "ab" * 150 + " " * 70 + "z",
]
