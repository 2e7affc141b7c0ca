"""Short, classic functions, read as text: each becomes a few training samples."""
import csv
import json
import math
import os
import random
import re
import time
import collections
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta


def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fibonacci_sequence(n):
    """Return a list of the first n Fibonacci numbers."""
    sequence = []
    a, b = 0, 1
    for _ in range(n):
        sequence.append(a)
        a, b = b, a + b
    return sequence


def factorial(n):
    """Return the factorial of n."""
    if n < 0:
        raise ValueError("n must be non-negative")
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(math.sqrt(n)) + 1):
        if n % i == 0:
            return False
    return True


def primes_up_to(limit):
    """Return all prime numbers up to limit with the sieve of Eratosthenes."""
    is_prime = [True] * (limit + 1)
    is_prime[0:2] = [False, False]
    for i in range(2, int(limit ** 0.5) + 1):
        if is_prime[i]:
            for j in range(i * i, limit + 1, i):
                is_prime[j] = False
    return [i for i, prime in enumerate(is_prime) if prime]


def prime_factors(n):
    """Return the prime factors of n."""
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return factors


def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return abs(a)


def lcm(a, b):
    """Return the least common multiple of a and b."""
    if a == 0 or b == 0:
        return 0
    return abs(a * b) // gcd(a, b)


def power(base, exponent):
    """Compute base raised to exponent by repeated squaring."""
    result = 1
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result


def is_even(n):
    """Return True if n is even."""
    return n % 2 == 0


def add(a, b):
    """Return the sum of a and b."""
    return a + b


def divide(a, b):
    """Divide a by b."""
    if b == 0:
        raise ZeroDivisionError("division by zero")
    return a / b


def mean(values):
    """Return the average of a list of numbers."""
    if not values:
        raise ValueError("mean of an empty list")
    return sum(values) / len(values)


def median(values):
    """Return the median of a list of numbers."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def standard_deviation(values):
    """Return the standard deviation of a list of numbers."""
    average = sum(values) / len(values)
    variance = sum((x - average) ** 2 for x in values) / len(values)
    return math.sqrt(variance)


def find_max(values):
    """Return the largest value in a list."""
    largest = values[0]
    for value in values[1:]:
        if value > largest:
            largest = value
    return largest


def sum_of_digits(n):
    """Return the sum of the digits of n."""
    total = 0
    n = abs(n)
    while n:
        total += n % 10
        n //= 10
    return total


def sum_list(values):
    """Return the sum of all numbers in a list."""
    total = 0
    for value in values:
        total += value
    return total


def celsius_to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


def fahrenheit_to_celsius(fahrenheit):
    """Convert a temperature from Fahrenheit to Celsius."""
    return (fahrenheit - 32) * 5 / 9


def distance(x1, y1, x2, y2):
    """Return the distance between two points."""
    return math.sqrt((x2 - x1) ** 2 + (y2 - y1) ** 2)


def quadratic_roots(a, b, c):
    """Return the real roots of the quadratic equation a*x^2 + b*x + c = 0."""
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return ()
    root = math.sqrt(discriminant)
    return ((-b + root) / (2 * a), (-b - root) / (2 * a))


def fizzbuzz(n):
    """Print the numbers from 1 to n, with Fizz, Buzz and FizzBuzz."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)


def binary_search(items, target):
    """Return the index of target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def linear_search(items, target):
    """Return the index of target in a list, or -1."""
    for index, item in enumerate(items):
        if item == target:
            return index
    return -1


def bubble_sort(items):
    """Sort a list with bubble sort."""
    n = len(items)
    for i in range(n):
        swapped = False
        for j in range(0, n - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
                swapped = True
        if not swapped:
            break
    return items


def insertion_sort(items):
    """Sort a list with insertion sort."""
    for i in range(1, len(items)):
        key = items[i]
        j = i - 1
        while j >= 0 and items[j] > key:
            items[j + 1] = items[j]
            j -= 1
        items[j + 1] = key
    return items


def selection_sort(items):
    """Sort a list with selection sort."""
    for i in range(len(items)):
        smallest = i
        for j in range(i + 1, len(items)):
            if items[j] < items[smallest]:
                smallest = j
        items[i], items[smallest] = items[smallest], items[i]
    return items


def quicksort(items):
    """Sort a list with quicksort."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)


def merge_sort(items):
    """Sort a list with merge sort."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    return merge(left, right)


def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def two_sum(numbers, target):
    """Return the indices of the two numbers that add up to target."""
    seen = {}
    for index, number in enumerate(numbers):
        if target - number in seen:
            return seen[target - number], index
        seen[number] = index
    return None


def max_subarray(numbers):
    """Return the largest sum of a contiguous subarray."""
    best = current = numbers[0]
    for number in numbers[1:]:
        current = max(number, current + number)
        best = max(best, current)
    return best


def remove_duplicates(items):
    """Remove duplicates from a list and keep the order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def flatten(items):
    """Flatten a nested list."""
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


def chunk_list(items, size):
    """Split a list into chunks of the given size."""
    return [items[i:i + size] for i in range(0, len(items), size)]


def rotate_list(items, k):
    """Rotate a list to the right by k positions."""
    if not items:
        return items
    k = k % len(items)
    return items[-k:] + items[:-k]


def transpose(matrix):
    """Return the transpose of a matrix."""
    return [list(row) for row in zip(*matrix)]


def matrix_multiply(a, b):
    """Multiply two matrices."""
    rows, inner, columns = len(a), len(b), len(b[0])
    result = [[0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            for k in range(inner):
                result[i][j] += a[i][k] * b[k][j]
    return result


def dot_product(a, b):
    """Return the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b))


def group_by(items, key):
    """Group the items of a list by the result of a key function."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def invert_dict(mapping):
    """Swap the keys and values of a dictionary."""
    return {value: key for key, value in mapping.items()}


def merge_dicts(first, second):
    """Merge two dictionaries into a new one."""
    result = dict(first)
    result.update(second)
    return result


def reverse_string(text):
    """Return the reverse of a string."""
    return text[::-1]


def is_palindrome(text):
    """Return True if a string is a palindrome."""
    cleaned = [c.lower() for c in text if c.isalnum()]
    return cleaned == cleaned[::-1]


def count_vowels(text):
    """Count the vowels in a string."""
    return sum(1 for c in text.lower() if c in "aeiou")


def count_words(text):
    """Count how often each word occurs in a text."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def word_frequency(text):
    """Return the most common words of a text."""
    words = re.findall(r"\w+", text.lower())
    return collections.Counter(words).most_common()


def is_anagram(first, second):
    """Return True if two strings are anagrams."""
    return sorted(first.lower()) == sorted(second.lower())


def capitalize_words(text):
    """Capitalize the first letter of every word."""
    return " ".join(word.capitalize() for word in text.split())


def caesar_cipher(text, shift):
    """Encrypt a text with the Caesar cipher."""
    result = []
    for char in text:
        if char.isalpha():
            base = ord("A") if char.isupper() else ord("a")
            result.append(chr((ord(char) - base + shift) % 26 + base))
        else:
            result.append(char)
    return "".join(result)


def levenshtein(a, b):
    """Compute the edit distance between two strings."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        current = [i]
        for j, y in enumerate(b, start=1):
            cost = 0 if x == y else 1
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + cost))
        previous = current
    return previous[-1]


def longest_common_prefix(words):
    """Return the longest common prefix of a list of strings."""
    if not words:
        return ""
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


def slugify(text):
    """Convert a text to a URL slug."""
    text = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return text.strip("-")


def is_valid_email(email):
    """Check if a string looks like an email address."""
    return re.match(r"^[\w.+-]+@[\w-]+\.[\w.-]+$", email) is not None


def balanced_brackets(text):
    """Return True if all brackets in a text are balanced."""
    pairs = {")": "(", "]": "[", "}": "{"}
    stack = []
    for char in text:
        if char in pairs.values():
            stack.append(char)
        elif char in pairs:
            if not stack or stack.pop() != pairs[char]:
                return False
    return not stack


def to_binary(n):
    """Convert an integer to a binary string."""
    if n == 0:
        return "0"
    digits = []
    while n > 0:
        digits.append(str(n % 2))
        n //= 2
    return "".join(reversed(digits))


def roman_to_int(roman):
    """Convert a Roman numeral to an integer."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    previous = 0
    for char in reversed(roman):
        value = values[char]
        if value < previous:
            total -= value
        else:
            total += value
            previous = value
    return total


def list_files(path):
    """Return the names of all files in a directory."""
    files = []
    for name in sorted(os.listdir(path)):
        full_path = os.path.join(path, name)
        if os.path.isfile(full_path):
            files.append(name)
    return files


def find_files(path, extension):
    """Find all files with the given extension below a directory."""
    result = []
    for root, dirs, files in os.walk(path):
        for name in files:
            if name.endswith(extension):
                result.append(os.path.join(root, name))
    return result


def directory_size(path):
    """Return the total size of all files below a directory in bytes."""
    total = 0
    for root, dirs, files in os.walk(path):
        for name in files:
            total += os.path.getsize(os.path.join(root, name))
    return total


def read_file(path):
    """Read a text file and return its content."""
    with open(path, encoding="utf-8") as f:
        return f.read()


def read_lines(path):
    """Read a text file and return a list of its lines."""
    with open(path, encoding="utf-8") as f:
        return [line.rstrip("\n") for line in f]


def write_file(path, content):
    """Write a string to a text file."""
    with open(path, "w", encoding="utf-8") as f:
        f.write(content)


def count_lines(path):
    """Count the lines of a text file."""
    count = 0
    with open(path, encoding="utf-8") as f:
        for line in f:
            count += 1
    return count


def load_json(path):
    """Load a JSON file."""
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def save_json(path, data):
    """Save data to a JSON file."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f, indent=2)


def read_csv(path):
    """Read a CSV file and return a list of dictionaries."""
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def write_csv(path, rows):
    """Write a list of dictionaries to a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def copy_file(source, target):
    """Copy a file in blocks."""
    with open(source, "rb") as src, open(target, "wb") as dst:
        while True:
            block = src.read(65536)
            if not block:
                break
            dst.write(block)


def fetch_url(url):
    """Download a web page and return its text."""
    from urllib.request import urlopen
    with urlopen(url) as response:
        return response.read().decode("utf-8")


def days_between(start, end):
    """Return the number of days between two dates."""
    start_date = datetime.strptime(start, "%Y-%m-%d")
    end_date = datetime.strptime(end, "%Y-%m-%d")
    return abs((end_date - start_date).days)


def is_leap_year(year):
    """Return True if a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def format_time(seconds):
    """Format a number of seconds as hours, minutes and seconds."""
    hours, seconds = divmod(int(seconds), 3600)
    minutes, seconds = divmod(seconds, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


def roll_dice(sides=6):
    """Return a random roll of a die."""
    return random.randint(1, sides)


def random_password(length=12):
    """Generate a random password."""
    import secrets
    import string
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(length))


def shuffle(items):
    """Return a shuffled copy of a list."""
    result = list(items)
    for i in range(len(result) - 1, 0, -1):
        j = random.randint(0, i)
        result[i], result[j] = result[j], result[i]
    return result


def timer(func):
    """Decorator that prints how long a function takes."""
    import functools

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = func(*args, **kwargs)
        elapsed = time.perf_counter() - start
        print(f"{func.__name__} took {elapsed:.3f} s")
        return result
    return wrapper


def retry(func, attempts=3, delay=1.0):
    """Call a function again until it succeeds."""
    for attempt in range(attempts):
        try:
            return func()
        except Exception:
            if attempt == attempts - 1:
                raise
            time.sleep(delay)


def memoize(func):
    """Decorator that caches the results of a function."""
    cache = {}

    def wrapper(*args):
        if args not in cache:
            cache[args] = func(*args)
        return cache[args]
    return wrapper


def bfs(graph, start):
    """Visit the nodes of a graph in breadth-first order."""
    visited = {start}
    order = []
    queue = deque([start])
    while queue:
        node = queue.popleft()
        order.append(node)
        for neighbor in graph[node]:
            if neighbor not in visited:
                visited.add(neighbor)
                queue.append(neighbor)
    return order


def dfs(graph, start, visited=None):
    """Visit the nodes of a graph in depth-first order."""
    if visited is None:
        visited = set()
    visited.add(start)
    for neighbor in graph[start]:
        if neighbor not in visited:
            dfs(graph, neighbor, visited)
    return visited


def dijkstra(graph, start):
    """Compute the shortest distances from start to all nodes of a graph."""
    import heapq
    distances = {start: 0}
    queue = [(0, start)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances[node]:
            continue
        for neighbor, weight in graph[node].items():
            candidate = distance + weight
            if candidate < distances.get(neighbor, math.inf):
                distances[neighbor] = candidate
                heapq.heappush(queue, (candidate, neighbor))
    return distances


def permutations(items):
    """Return all permutations of a list."""
    if len(items) <= 1:
        return [list(items)]
    result = []
    for i, item in enumerate(items):
        rest = items[:i] + items[i + 1:]
        for permutation in permutations(rest):
            result.append([item] + permutation)
    return result


def hanoi(n, source, target, spare):
    """Print the moves that solve the towers of Hanoi."""
    if n == 0:
        return
    hanoi(n - 1, source, spare, target)
    print(f"Move disk {n} from {source} to {target}")
    hanoi(n - 1, spare, target, source)


def softmax(values):
    """Compute the softmax of a list of numbers."""
    largest = max(values)
    exps = [math.exp(v - largest) for v in values]
    total = sum(exps)
    return [e / total for e in exps]


def sigmoid(x):
    """Compute the sigmoid function."""
    return 1 / (1 + math.exp(-x))


def linear_regression(xs, ys):
    """Fit a line to points and return slope and intercept."""
    n = len(xs)
    mean_x = sum(xs) / n
    mean_y = sum(ys) / n
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    variance = sum((x - mean_x) ** 2 for x in xs)
    slope = covariance / variance
    return slope, mean_y - slope * mean_x


def greet(name):
    """Return a greeting."""
    return f"Hello, {name}!"


def hello_world():
    """Print Hello, world!"""
    print("Hello, world!")


def main():
    """Run the program."""
    name = input("What is your name? ")
    print(f"Hello, {name}!")
