"""Short, classic classes, read as text: each becomes a few training samples."""
import math
import time
from collections import deque


class Stack:
    """A simple stack."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0

    def __len__(self):
        return len(self.items)


class Queue:
    """A simple first-in, first-out queue."""

    def __init__(self):
        self.items = deque()

    def enqueue(self, item):
        self.items.append(item)

    def dequeue(self):
        if not self.items:
            raise IndexError("dequeue from an empty queue")
        return self.items.popleft()

    def __len__(self):
        return len(self.items)


class Node:
    """A node of a linked list."""

    def __init__(self, value, next=None):
        self.value = value
        self.next = next


class LinkedList:
    """A singly linked list."""

    def __init__(self):
        self.head = None

    def append(self, value):
        node = Node(value)
        if self.head is None:
            self.head = node
            return
        current = self.head
        while current.next is not None:
            current = current.next
        current.next = node

    def __iter__(self):
        current = self.head
        while current is not None:
            yield current.value
            current = current.next


class BinaryTree:
    """A binary search tree."""

    def __init__(self, value):
        self.value = value
        self.left = None
        self.right = None

    def insert(self, value):
        if value < self.value:
            if self.left is None:
                self.left = BinaryTree(value)
            else:
                self.left.insert(value)
        else:
            if self.right is None:
                self.right = BinaryTree(value)
            else:
                self.right.insert(value)

    def contains(self, value):
        if value == self.value:
            return True
        child = self.left if value < self.value else self.right
        return child is not None and child.contains(value)


class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def distance_to(self, other):
        return math.sqrt((self.x - other.x) ** 2 + (self.y - other.y) ** 2)


class Rectangle:
    """A rectangle with a width and a height."""

    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)

    def __repr__(self):
        return f"Rectangle({self.width}, {self.height})"


class Circle:
    """A circle with a radius."""

    def __init__(self, radius):
        self.radius = radius

    def area(self):
        return math.pi * self.radius ** 2

    def circumference(self):
        return 2 * math.pi * self.radius


class BankAccount:
    """A bank account with a balance."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance

    def __repr__(self):
        return f"BankAccount({self.owner!r}, {self.balance})"


class Animal:
    """Base class of all animals."""

    def __init__(self, name):
        self.name = name

    def speak(self):
        raise NotImplementedError


class Dog(Animal):
    """A dog."""

    def speak(self):
        return f"{self.name} says woof!"


class Person:
    """A person with a name and an age."""

    def __init__(self, name, age):
        self.name = name
        self.age = age

    def __str__(self):
        return f"{self.name} ({self.age})"

    def birthday(self):
        self.age += 1

    def is_adult(self):
        return self.age >= 18


class Counter:
    """Count things."""

    def __init__(self):
        self.count = 0

    def increment(self, amount=1):
        self.count += amount

    def reset(self):
        self.count = 0


class ShoppingCart:
    """A shopping cart."""

    def __init__(self):
        self.items = {}

    def add(self, name, price, quantity=1):
        self.items[name] = (price, quantity)

    def remove(self, name):
        self.items.pop(name, None)

    def total(self):
        return sum(price * quantity for price, quantity in self.items.values())


class Cache:
    """A cache with a limited size that drops the oldest entry."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.entries = {}

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def put(self, key, value):
        self.entries.pop(key, None)
        self.entries[key] = value
        if len(self.entries) > self.capacity:
            oldest = next(iter(self.entries))
            del self.entries[oldest]


class Timer:
    """Context manager that measures elapsed time."""

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc):
        self.elapsed = time.perf_counter() - self.start
        return False


class TodoList:
    """A list of things to do."""

    def __init__(self):
        self.tasks = []

    def add(self, title):
        self.tasks.append({"title": title, "done": False})

    def complete(self, index):
        self.tasks[index]["done"] = True

    def pending(self):
        return [task for task in self.tasks if not task["done"]]


class Matrix:
    """A small matrix class."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def __getitem__(self, index):
        return self.rows[index]

    def __add__(self, other):
        return Matrix([[a + b for a, b in zip(r, s)] for r, s in zip(self.rows, other.rows)])

    def __mul__(self, scalar):
        return Matrix([[scalar * a for a in row] for row in self.rows])

    def transpose(self):
        return Matrix(zip(*self.rows))
