"""The names, and the tables made of them: `list`, `names DIR`, `parts`.

`names` reads from DIR what the other tools printed, one line for each name.
"""

import itertools
import os
import sys
import zlib

import fnv

EXACT = [
    ("", "empty: the hash only, not a valid lock name"),
    ("223 345", "the article's key"),
    ("nightly report", ""),
    ("geocoder", ""),
    ("a", ""),
    ("b", ""),
    ("A", "case matters"),
    ("foobar", "from the FNV authors' own tests"),
    ("subscription_usage_42", ""),
    ("myKey", ""),
    ("The quick brown fox jumps over the lazy dog", ""),
    # Digits.
    ("0", "digits only"),
    ("42", "digits only"),
    ("007", "digits only"),
    ("-1", "digits and a sign"),
    ("9223372036854775808", "digits only: 2^63"),
    # Notable hashes.
    ("!0IC=VloaY", "FNV-1a is 0"),
    ("77kepQFQ8Kl", "FNV-1a is 0"),
    ("123456789", "the CRC check string"),
    ("job 649819057", "CRC-32 is 0x80000000"),
    ("job 1750236452", "CRC-32 is 0x7fffffff"),
    ("job 4008307722", "CRC-32 is 0xffffffff"),
    ("polygenelubricants", "31-multiplier hash is -2^31"),
    ("Aa", "31-multiplier hash as for BB"),
    ("BB", "31-multiplier hash as for Aa"),
    ("hello world", "31-multiplier hash wraps"),
    # White space and control characters.
    (" ", "one space"),
    ("trailing space ", ""),
    ("trailing spaces   ", ""),
    (" leading space", ""),
    ("two  spaces", ""),
    ("line\nbreak", ""),
    ("line\r\nbreak", ""),
    ("tab\tstop", ""),
    ("trailing newline\n", ""),
    ("nul\0inside", "NUL inside"),
    ("\0", "NUL alone"),
    ("nul at the end\0", ""),
    ("\x01\x1b\x7f", "control characters"),
    ("\x80\x9f\xa0", "U+0080, U+009F, U+00A0"),
    ("\u2028\u2029", "line and paragraph separators"),
    ("\ufeffname", "byte order mark, then name"),
    ("name", "the same without the mark"),
    # Punctuation that means something to someone on the way.
    ("back\\slash", ""),
    ("\\", "one backslash"),
    ("back\\ slash", "backslash, then a space"),
    ("it's", "single quote"),
    ("'; select 1; --", ""),
    ('"quoted"', "double quotes"),
    ("`back` $$dollar$$ $1 ? :name", ""),
    ("100%", "percent sign"),
    ("%s %d %%", ""),
    ("/* comment */", ""),
    ("*/ */* /*/", ""),
    ("-- comment", ""),
    ("#{1}", ""),
    ("a,b;c|d:e=f&g", ""),
    ("public.reserved_servers", ""),
    # Beyond ASCII.
    ("Größenänderung", "umlauts"),
    ("Straße", "sharp s"),
    ("STRASSE", ""),
    ("caf\u00e9", "precomposed e acute"),
    ("cafe\u0301", "e and combining acute: another name"),
    ("A\u030a", "A and combining ring"),
    ("\u00c5", "A with ring"),
    ("\u212b", "Angstrom sign"),
    ("Z\u0351\u036b\u0343a\u0321\u034alg\u0355o", "combining marks"),
    ("Ελλάδα", "Greek"),
    ("Привет, мир", "Cyrillic"),
    ("שלום", "Hebrew"),
    ("العربية", "Arabic"),
    ("नमस्ते", "Devanagari"),
    ("日本語", "CJK"),
    ("夜間報告", "CJK"),
    ("한국어", "Hangul syllables"),
    ("\u1112\u1161\u11ab", "Hangul jamo"),
    ("ﬁ", "ligature fi"),
    ("\ud7ff\ue000", "on both sides of the surrogates"),
    ("\uffff", "the last UTF-16 unit, a noncharacter"),
    ("\ufffd", "replacement character"),
    # Beyond the Basic Multilingual Plane.
    ("😀", "emoji"),
    ("lock 🔒", "emoji"),
    ("🔒🔑", "emoji"),
    ("👩‍👩‍👧‍👦", "emoji joined by ZWJ"),
    ("👍🏽", "emoji with skin tone"),
    ("🇩🇪", "regional indicators"),
    ("❤️", "variation selector"),
    ("𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "mathematical letters"),
    ("𠮷野家", "CJK extension B"),
    ("\U00010000", "the first astral character"),
    ("\U0010ffff", "the last character"),
    ("ä日😀\u0301\n\\ '\" ", "a bit of everything"),
    ("ä日😀\u0301\0\n\\ '\" ", "the same, with NUL"),
]

# Not stored in full: (unit, count).
REPEATED = [
    ("long name ", 30),
    ("x", 63),
    ("x", 64),
    ("ß", 4096),
    ("\U0010ffff", 20000),
    ("a", 1048576),
    ("é😀", 174763),
]

PARTS = [
    (["223", "345"], "the article's key"),
    (["223", "34", "5"], ""),
    (["22", "3", "345"], ""),
    (["223 345"], "one part with a space"),
    (["223\\", "345"], ""),
    (["223\\ 345"], ""),
    (["223", " 345"], ""),
    (["223 ", "345"], ""),
    (["345", "223"], "order matters"),
    (["nightly report"], ""),
    (["nightly", "report"], ""),
    (["geocoder"], "one plain part is the plain name"),
    (["a"], ""),
    (["a", "b", "c"], ""),
    (["a b", "c"], ""),
    (["a", "b c"], ""),
    (["a b c"], ""),
    (["\\"], ""),
    (["\\\\"], ""),
    (["\\", "\\"], ""),
    ([" "], ""),
    (["  "], ""),
    ([" ", " "], ""),
    (["\\ "], ""),
    ([" \\"], ""),
    (["\\", " "], ""),
    ([""], "one empty part: the empty name, so the hash only"),
    (["", ""], "two empty parts: one space"),
    (["", "", ""], ""),
    (["", "a"], ""),
    (["a", ""], ""),
    (["a", "", "b"], ""),
    (["tab\there", "line\nbreak", "no\u00a0break"], "only the ASCII space is escaped"),
    (["nul\0", "\0"], ""),
    (["user,1", "hex:61"], ""),
    (["it's", '"quoted"'], ""),
    (["Größe", "日本語", "😀"], ""),
    (["lock 🔒", "e\u0301 \u00e9"], ""),
    (["\ud7ff\ue000", "\uffff", "\U0010ffff"], ""),
    ([str(n) for n in range(100)], "a hundred parts"),
    (["x" * 300, " " * 50, "\\" * 50], "long parts"),
]


def encoded(text):
    return "hex:" + text.encode().hex()


def names():
    """Each name as it is written in the tables, itself, and what it is."""
    for name, about in EXACT:
        yield encoded(name), name, about or ascii(name)
    for unit, count in REPEATED:
        yield f"repeat:{unit.encode().hex()}:{count}", unit * count, f"{len(unit.encode()) * count} bytes"


def fnv1a64(name):
    unsigned = fnv.hash(name.encode(), algorithm=fnv.fnv_1a, bits=64)
    # PostgreSQL's bigint is signed.
    return unsigned, unsigned - 2**64 if unsigned >= 2**63 else unsigned


def printed_by(directory, tool):
    with open(os.path.join(directory, tool), newline="\n") as lines:
        lines = lines.read().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    numbers = [line for line in lines if not line.startswith("#")]
    assert len(numbers) == len(EXACT) + len(REPEATED), tool
    return numbers, comments


def print_names(directory):
    times31, _ = printed_by(directory, "times31")
    pglocks_1, sql_1 = printed_by(directory, "pglocks_1")
    pglocks_2, sql_2 = printed_by(directory, "pglocks_2")
    pglock, _ = printed_by(directory, "pglock_1")
    ruby = printed_by(directory, "crc32")[0] if os.path.exists(os.path.join(directory, "crc32")) else None

    columns = [
        "name",
        "fnv1a64_signed",
        "crc32",
        "times31",
        "django_pglocks_1",
        "django_pglocks_2",
        "django_pglock",
        "fnv1a64_unsigned",
        "about",
    ]
    print(*columns, sep="\t")
    print("# Made by scripts/vectors; do not edit.")
    print("# name: hex:<its UTF-8 bytes>, or repeat:<the bytes of a unit>:<how many times>")
    print("# fnv1a64_*: Python, fnv 0.2.0, fnv.hash(name.encode(), algorithm=fnv.fnv_1a, bits=64);")
    print("#   signed is the same 64 bits as a PostgreSQL bigint")
    print("# crc32: Zlib.crc32 of Ruby, zlib.crc32 of Python; unsigned, sent as bigint")
    print("# times31: the Knex article's hashStringToInt, run by Node.js; sent as bigint")
    print("# django_pglocks_1: django-pglocks 1.0.4 (1.0.2 to 1.0.4 are alike); what it sent for \"223 345\":")
    print(*(f"#   {line[2:]}" for line in sql_1), sep="\n")
    print("# django_pglocks_2: django-pglocks 2.1.0 with django-pgware 1.0.0; what it sent for \"223 345\":")
    print(*(f"#   {line[2:]}" for line in sql_2), sep="\n")
    print("# django_pglock: django-pglock 1.8.0, pglock.advisory(name).int_lock_id; as a lock it refuses the empty name")
    print("# The empty name tests the hashes only. No other tool of this table refuses any of the names.")
    print("# A name with NUL in it cannot be a PostgreSQL text: there is nothing to compare in SQL.")
    seen = set()
    for i, (written, name, about) in enumerate(names()):
        assert name not in seen, written
        seen.add(name)
        assert about.isascii(), about
        crc32 = zlib.crc32(name.encode())
        assert ruby is None or int(ruby[i]) == crc32, written
        unsigned, signed = fnv1a64(name)
        print(written, signed, crc32, times31[i], pglocks_1[i], pglocks_2[i], pglock[i], unsigned, about, sep="\t")


def joined(parts):
    return " ".join(part.replace("\\", "\\\\").replace(" ", "\\ ") for part in parts)


def print_parts():
    # Different lists are different names: every list of at most 3 parts of at most 3 characters.
    words = ["".join(word) for n in range(4) for word in itertools.product("a \\", repeat=n)]
    lists = [parts for n in range(1, 4) for parts in itertools.product(words, repeat=n)]
    assert len({joined(parts) for parts in lists}) == len(lists)

    print("parts", "joined", "fnv1a64_signed", "about", sep="\t")
    print("# Made by scripts/vectors; do not edit.")
    print("# parts: hex:<UTF-8 bytes> of each, separated by commas")
    print("# joined: in each part \\ became \\\\ and a space became \\ and a space; one space between parts")
    print("# fnv1a64_signed: of joined, as in names.tsv")
    print("# Zero parts are an error and have no row. One empty part gives the empty name.")
    seen = set()
    for parts, about in PARTS:
        name = joined(parts)
        assert name not in seen, parts
        seen.add(name)
        print(",".join(map(encoded, parts)), encoded(name), fnv1a64(name)[1], about or ascii(parts), sep="\t")


def main():
    assert fnv1a64("223 345")[1] == 3755351481708176604
    assert fnv1a64("")[1] == -3750763034362895579
    match sys.argv[1:]:
        case ["list"]:
            for written, _, _ in names():
                print(written)
        case ["names", directory]:
            print_names(directory)
        case ["parts"]:
            print_parts()
        case _:
            sys.exit(__doc__)


main()
