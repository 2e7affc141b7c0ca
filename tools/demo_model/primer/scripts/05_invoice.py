from dataclasses import dataclass, field


@dataclass
class Item:
    name: str
    price: float
    quantity: int = 1

    @property
    def total(self):
        return self.price * self.quantity


@dataclass
class Invoice:
    customer: str
    items: list = field(default_factory=list)

    def add(self, item):
        self.items.append(item)

    @property
    def total(self):
        return sum(item.total for item in self.items)
