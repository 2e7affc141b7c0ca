# Ask for a name and greet the user
name = input("What is your name? ")
print(f"Hello, {name}!")
