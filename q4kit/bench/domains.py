"""Ten questions each for chat, STEM, maths and code, written for this bench.

They are fixed so that accept length and TPOT can be compared between servers; changing one changes `fingerprint`,
which every result carries. They are not the held-out prompts of any published table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

OUTPUT_TOKENS = 512
"""Tokens generated per question."""


@dataclass(frozen=True)
class Question:
    """One user turn; `index` counts from 0 inside its domain."""

    domain: str
    index: int
    text: str


_TEXTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "I have three days in a hilly coastal town at the end of October, no car and a ten-year-old who likes "
        "trains. The weather will probably be poor on one of the days. Plan the three days hour by hour, keep the "
        "walking under eight kilometres a day, and say which parts you would swap if it rains.",
        "My flatmate keeps using my bicycle without asking and returned it last week with a bent wheel. We get on "
        "well otherwise and share a kitchen. Write the message I should send tonight, then explain in a few "
        "paragraphs why you chose that tone and what I should do if the answer is a joke.",
        "Help me decide between two job offers. One is a small family firm twenty minutes from home that pays ten "
        "per cent less; the other is a large company with an hour's commute, a clear ladder and a reputation for "
        "late evenings. I am thirty-four, have a baby and like fixing things. Ask no questions, just reason it out.",
        "I want to start baking bread with the flour, yeast, salt and oven I already have. I have failed twice: the "
        "first loaf was a brick, the second collapsed. Explain what most likely went wrong in each case and give me "
        "a schedule for next Saturday from eight in the morning.",
        "Write a speech of about three minutes for my grandmother's ninetieth birthday. She ran a hardware shop, "
        "cannot stand sentimentality, has outlived two husbands and beats everyone at cards. About forty people "
        "will be there, some of whom do not like each other.",
        "Explain to a neighbour who distrusts all apps how he can still buy tickets, see a doctor and talk to his "
        "bank in five years' time. Be respectful: he was an electrician and understands technology better than he "
        "lets on. He will read your answer on paper.",
        "Our book club of seven people has read nothing but crime novels for two years. Suggest six very different "
        "books that a reader of crime novels could like, one paragraph on each, and say in which order to read them "
        "so that nobody leaves the club.",
        "I have a balcony facing north-east, two metres by one, in a city with cold winters. I water once a week "
        "when I remember. Tell me what to plant in which month, what it will look like in July, and what I should "
        "stop hoping for.",
        "Continue this conversation in a natural way for at least fifteen turns. A: You said the boat would be "
        "here. B: I said it would be here if the tide was right. A: And is the tide right? B: Ask me something "
        "easier. They are brother and sister and have not met for six years.",
        "My manager wants a weekly report that nobody reads. Draft a replacement that takes me ten minutes, tells "
        "her what she really needs to know, and has a place for bad news. Show it filled in for a week in which one "
        "supplier was late and one customer complained.",
    ),
    "stem": (
        "Explain why a freely hanging chain and a soap film between two rings lead to the same family of curves, "
        "although one minimises potential energy and the other area. Derive the equation in both cases and say what "
        "the integration constants mean.",
        "A closed bottle, half full of water at room temperature, is taken into orbit and set floating in the "
        "cabin. Describe what the water does over the first minute, then over an hour, and which physical "
        "quantities decide it. Treat wetting and non-wetting walls separately.",
        "How does a cell make sure that a broken chromosome is repaired with the right partner end? Compare end "
        "joining and homologous recombination: when each is used in the cell cycle, what can go wrong, and what "
        "kind of mutation each leaves behind.",
        "Describe how the spectrum of a star tells us its temperature, its composition, its speed and, in some "
        "cases, the mass of a companion that cannot be seen. For each quantity name the feature of the spectrum "
        "that is measured and the main source of error.",
        "A lithium-ion cell loses a fifth of its capacity in five hundred cycles at 25 degrees and in two hundred "
        "at 45. Which mechanisms could explain the difference, how would you tell them apart with measurements on "
        "whole cells, and how with measurements after opening them?",
        "Why do rivers meander on flat plains and braid at the foot of mountains? Discuss slope, sediment and bank "
        "strength, and describe an experiment on a table with sand and water that shows both.",
        "Explain the difference between a catalyst that lowers an activation energy and an enzyme that is limited "
        "by diffusion. Derive the Michaelis-Menten equation, state its assumptions, and give two situations in "
        "which it fails badly.",
        "An alternating current flows in a thick copper bar. Explain why it crowds to the surface, derive the skin "
        "depth from Maxwell's equations, and estimate from memory at which frequency a one centimetre bar begins "
        "to waste most of its metal.",
        "What do we learn about the inside of the Earth from earthquake waves that cannot be learned in any other "
        "way? Go from the arrival times at many stations to the liquid outer core, step by step, and mention the "
        "reasoning errors one could make on the way.",
        "Describe how a vaccine that carries only instructions for one protein leads to antibodies and to memory "
        "years later. Name the cells in the order in which they act, what each one recognises, and where in the "
        "body it happens.",
    ),
    "maths": (
        "Let a sequence start with 3 and let each further term be the square of the one before minus 2. Prove that "
        "all terms are odd and pairwise relatively prime, and find a closed form.",
        "How many ways are there to tile a board of 3 by 20 squares with dominoes? Derive the recurrence, solve it, "
        "and check the result for the first four even widths by hand.",
        "A stick is broken at two random points chosen independently and uniformly. Find the probability that the "
        "pieces form a triangle, then the probability that they form an acute triangle. Show the regions.",
        "Prove that among any thirteen distinct real numbers there are two, x and y, for which the fraction of "
        "their difference over one plus their product lies strictly between 0 and 2 minus the square root of 3.",
        "Find all functions f from the positive integers to the positive integers with f(m + f(n)) = n + f(m) for "
        "all m and n. Justify every step, including why there are no others.",
        "Evaluate the integral of the logarithm of the sine from 0 to half of pi in two different ways, and explain "
        "why the improper integral exists.",
        "Show that the determinant of the matrix whose entry (i, j) is the greatest common divisor of i and j, for "
        "i and j from 1 to n, equals the product of Euler's totient of 1 to n.",
        "Points are placed one after another at random on a circle. What is the expected number of points until "
        "the centre lies inside their convex hull? Derive the probability for n points first.",
        "Let G be a finite group in which every element equals its own inverse. Prove that G is abelian and that "
        "its order is a power of two. Then describe all such groups of order at most 16.",
        "A polynomial with integer coefficients takes the value 7 at four different integers. Prove that it cannot "
        "take the value 14 at any integer, and decide for which other values the same argument works.",
    ),
    "code": (
        "Write a Python class that keeps the last n values of a stream and returns their median in logarithmic "
        "time per step. Use two heaps with lazy deletion, give it type hints and a docstring, and add tests that "
        "compare it with a slow version on random input.",
        "Here is a function that should return the index of the first element not less than x in a sorted list, "
        "or the length of the list: def find(a, x): lo, hi = 0, len(a) - 1; while lo < hi: mid = (lo + hi) // 2; "
        "if a[mid] < x: lo = mid; else: hi = mid; return lo. Find every fault, explain each with an input, and "
        "write the corrected function with a loop invariant.",
        "Write a small HTTP rate limiter in Go as middleware: a token bucket per client address, buckets that are "
        "forgotten after ten minutes, no global lock on the hot path. Include tests with a fake clock.",
        "Implement in Rust a parser for arithmetic expressions with the four operations, unary minus, brackets and "
        "variables. Return an error type that names position and expectation. Evaluate with a map of variables and "
        "write property tests in words.",
        "A table holds (account, time, amount). Write one SQL query that returns for every account the longest run "
        "of consecutive calendar days with at least one payment, its start and its end. Explain the window "
        "functions you use and how an index could help.",
        "Write a C function that copies overlapping memory regions correctly without calling the library, then a "
        "version that moves eight bytes at a time where alignment allows. Explain which parts a compiler may "
        "assume and which it may not.",
        "Design a TypeScript module for undo and redo in a drawing program. Commands can be merged while dragging, "
        "history is limited to two hundred steps, and saving must know whether the drawing changed. Give the "
        "interfaces, the implementation and an example.",
        "Explain why this bash line can delete the wrong files: for f in $(ls *.tmp); do rm $f; done. Then write "
        "a script that removes temporary files older than seven days under a given folder, with a dry run, a log, "
        "and correct handling of spaces and of symbolic links.",
        "Write a CUDA kernel that sums the rows of a matrix stored in row order, one warp for a row, with shuffles "
        "for the reduction. Then discuss what changes when rows are shorter than a warp or longer than a million "
        "elements.",
        "Refactor in your head: a web handler of three hundred lines that validates, computes a price, writes to "
        "two tables and sends a mail. Show the target structure in Python with functions and data classes, which "
        "test you would write first, and how to get there in steps that can each be deployed.",
    ),
}


def questions(domains: tuple[str, ...] | None = None) -> list[Question]:
    """Return the questions of the given domains (all by default) in their fixed order."""
    chosen = domains or tuple(_TEXTS)
    unknown = [d for d in chosen if d not in _TEXTS]
    if unknown:
        raise KeyError(f"no such domain {unknown[0]!r}, expected one of {', '.join(_TEXTS)}")
    return [Question(d, i, text) for d in chosen for i, text in enumerate(_TEXTS[d])]


def names() -> tuple[str, ...]:
    return tuple(_TEXTS)


def fingerprint() -> str:
    """Return the sha256 of all questions, hex."""
    whole = "\0".join(f"{q.domain}\0{q.index}\0{q.text}" for q in questions())
    return hashlib.sha256(whole.encode()).hexdigest()
