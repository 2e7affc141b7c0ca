import pandas as pd

df = pd.read_csv("data.csv")
print(df.head())
print(df.describe())

grouped = df.groupby("category")["value"].mean()
print(grouped.sort_values(ascending=False))
