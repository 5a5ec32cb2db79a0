"""The order in which the functions of a timing run, round by round.

The clock of a power-capped GPU rises behind a function that draws little power, so a fixed order
favours whoever runs behind a slow one: by 3 to 5 % on an H200. It knows neither torch nor what is
timed.
"""


def orders(count, rounds):
    """For each round the numbers 0 to count - 1 in the order in which they run.

    The rows of a Williams design: in `count` rounds (twice as many where count is odd) every
    function runs once in each place, and directly behind each other function equally often. A plain
    rotation keeps every function's predecessor.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -i // 2 % count for i in range(count)]
    for number in range(rounds):
        row = [(place + number) % count for place in zigzag]
        yield row[::-1] if count % 2 and number // count % 2 else row
