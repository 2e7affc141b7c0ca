import argparse


def main():
    parser = argparse.ArgumentParser(description="Count the words of a file.")
    parser.add_argument("path", help="the file to read")
    parser.add_argument("-n", "--top", type=int, default=10, help="how many words to print")
    args = parser.parse_args()

    with open(args.path, encoding="utf-8") as f:
        words = f.read().lower().split()
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    for word, count in sorted(counts.items(), key=lambda item: -item[1])[:args.top]:
        print(f"{count:6d} {word}")


if __name__ == "__main__":
    main()
