"""Python functions that train_phi.py teaches."""


def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def lcm(a, b):
    return a * b // gcd(a, b)


def is_palindrome(text):
    return text == text[::-1]


def flatten(rows):
    return [x for row in rows for x in row]


def transpose(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def binary_search(items, x):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


def bubble_sort(items):
    items = list(items)
    for i in range(len(items)):
        for j in range(len(items) - 1 - i):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def quick_sort(items):
    if len(items) < 2:
        return items
    first, *rest = items
    below = [x for x in rest if x < first]
    above = [x for x in rest if x >= first]
    return [*quick_sort(below), first, *quick_sort(above)]


def mean(numbers):
    return sum(numbers) / len(numbers)


def variance(numbers):
    m = mean(numbers)
    return sum((x - m) ** 2 for x in numbers) / len(numbers)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def power(x, n):
    result = 1
    while n:
        if n % 2:
            result *= x
        x, n = x * x, n // 2
    return result


def to_binary(n):
    digits = ""
    while n:
        digits = str(n % 2) + digits
        n //= 2
    return digits or "0"


def clamp(x, low, high):
    return max(low, min(x, high))


def reverse_words(text):
    return " ".join(reversed(text.split()))


def sieve(n):
    prime = [True] * (n + 1)
    for i in range(2, int(n**0.5) + 1):
        if prime[i]:
            for j in range(i * i, n + 1, i):
                prime[j] = False
    return [i for i in range(2, n + 1) if prime[i]]


def unique(items):
    seen = set()
    return [x for x in items if not (x in seen or seen.add(x))]


def chunks(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


def hanoi(n, a, b, c):
    if n == 0:
        return []
    return [*hanoi(n - 1, a, c, b), (a, c), *hanoi(n - 1, b, a, c)]


def collatz(n):
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps
