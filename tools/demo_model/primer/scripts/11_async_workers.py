import asyncio


async def worker(name, delay):
    await asyncio.sleep(delay)
    print(f"{name} is done")


async def main():
    await asyncio.gather(worker("a", 1), worker("b", 2))


if __name__ == "__main__":
    asyncio.run(main())
