//! No circle of modules within a crate, and nothing above `Device` names a runner.
//!
//! A module is a file. It depends on another where its code, imports included, has a path to it:
//! one that begins with `crate`, `self`, `super` or the name of a module below it, as far as that
//! path names files. A path to what a module re-exports is one to that module. What stands behind
//! `#[cfg(test)]` is left out, and so are the files of modules that are declared there.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

use super::{block_end, code_only, report, sources, Source};

/// Crates that have no circles.
const CRATES: &[&str] = &["kie-core", "kie-kernels"];

/// Crates that stand on `kie_kernels::device`, and the modules under it that they do not name.
const ABOVE: &[&str] = &["kie-core", "kie-server", "kie-py"];
const RUNNERS: &[&str] = &["cpu", "cuda", "hip", "mono", "sim"];
/// Files above that name one all the same.
const ASKING: &[&str] = &[
    // Says what this machine has, so it asks the CPU and the simulator themselves.
    "crates/kie-py/src/doctor.rs",
];

/// Segments of a module's path; none for the root.
type Path = Vec<String>;

/// A file, and the code of it that is not a test's.
struct Module {
    file: String,
    code: String,
}

/// `code` with what stands behind `#[cfg(test)]` blanked out; keeps lines.
fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    for mark in ["#[cfg(test)]", "#[cfg(all(test"] {
        while let Some(at) = out.find(mark) {
            let item = out[at..].find([';', '{']).map_or(out.len(), |n| at + n);
            let end = match out.as_bytes().get(item) {
                Some(b'{') => block_end(&out, item),
                _ => (item + 1).min(out.len()),
            };
            let blank = |c: char| if c == '\n' { c } else { ' ' };
            let blanked: String = out[at..end].chars().map(blank).collect();
            out.replace_range(at..end, &blanked);
        }
    }
    out
}

/// The modules of the crate whose root is the file `root`, from the `mod` lines on.
fn modules(sources: &[Source], root: &str) -> BTreeMap<Path, Module> {
    let mut found = BTreeMap::new();
    let mut left = vec![(Path::new(), root.to_owned())];
    while let Some((path, file)) = left.pop() {
        let source = sources.iter().find(|s| s.path == file);
        let code = without_tests(&code_only(source.map_or("", Source::text)));
        let (folder, name) = file.rsplit_once('/').unwrap();
        let owns_folder = matches!(name, "lib.rs" | "mod.rs");
        let folder = match owns_folder {
            true => folder.to_owned(),
            false => format!("{folder}/{}", name.trim_end_matches(".rs")),
        };
        for line in code.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let Some(["mod", child]) = words.last_chunk::<2>() else { continue };
            let Some(child) = child.strip_suffix(';') else { continue };
            let places = [format!("{folder}/{child}.rs"), format!("{folder}/{child}/mod.rs")];
            let place = places.into_iter().find(|place| sources.iter().any(|s| s.path == *place));
            let below = path.iter().cloned().chain([child.to_owned()]).collect();
            left.push((below, place.unwrap_or_else(|| panic!("{file}: no file of {child}"))));
        }
        found.insert(path, Module { file, code });
    }
    found
}

/// Every path of blanked code, with the line that it begins on; groups are taken apart.
fn paths(code: &str) -> Vec<(usize, Vec<&str>)> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(c) = code[at..].chars().next() {
        line += usize::from(c == '\n');
        if !part(c) {
            at += c.len_utf8();
            continue;
        }
        let length = path_at(&code[at..], &mut Vec::new(), &mut |path| {
            if path.len() > 1 {
                found.push((line, path.to_vec()));
            }
        });
        line += code[at..at + length].matches('\n').count();
        at += length;
    }
    found
}

/// Reads one path (or tree of an import) at the beginning of `code`, behind the segments `before`;
/// its length.
fn path_at<'a>(
    code: &'a str,
    before: &mut Vec<&'a str>,
    each: &mut dyn FnMut(&[&'a str]),
) -> usize {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let name = code.find(|c| !part(c)).unwrap_or(code.len());
    before.push(&code[..name]);
    let mut at = name;
    match code[at..].strip_prefix("::") {
        Some(rest) if rest.starts_with('{') => {
            let end = block_end(code, at + 2);
            at += 3;
            while at < end - 1 {
                at += match code[at..].chars().next() {
                    Some(c) if part(c) => path_at(&code[at..end - 1], before, each),
                    c => c.map_or(1, char::len_utf8),
                };
            }
            at = end;
        }
        Some(rest) if rest.starts_with(part) => at += 2 + path_at(rest, before, each),
        Some(_) | None => each(before),
    }
    before.pop();
    at
}

/// The module that a path in `here` leads to, if it is one of `modules`.
fn target(path: &[&str], here: &Path, modules: &BTreeMap<Path, Module>) -> Option<Path> {
    let below = |path: &Path, name: &str| path.iter().cloned().chain([name.to_owned()]).collect();
    let (mut found, mut rest) = match path[0] {
        "crate" => (Path::new(), &path[1..]),
        "self" => (here.clone(), &path[1..]),
        "super" => (here[..here.len().saturating_sub(1)].to_vec(), &path[1..]),
        child if modules.contains_key(&below(here, child)) => (here.clone(), path),
        _ => return None,
    };
    while rest.first() == Some(&"super") {
        found.pop();
        rest = &rest[1..];
    }
    for name in rest {
        let next: Path = below(&found, name);
        if !modules.contains_key(&next) {
            break;
        }
        found = next;
    }
    (found != *here).then_some(found)
}

/// A shortest circle of modules, a line for each step of it; none if there is none.
fn circle(modules: &BTreeMap<Path, Module>) -> Option<String> {
    let mut steps: BTreeMap<&Path, BTreeMap<Path, usize>> = BTreeMap::new();
    for (here, module) in modules {
        for (line, path) in paths(&module.code) {
            if let Some(to) = target(&path, here, modules) {
                steps.entry(here).or_default().entry(to).or_insert(line);
            }
        }
    }
    let back_to = |start: &Path| -> Option<Vec<Path>> {
        let mut from: BTreeMap<Path, Path> = BTreeMap::new();
        let mut left = VecDeque::from([start.clone()]);
        while let Some(at) = left.pop_front() {
            for to in steps.get(&at).into_iter().flat_map(BTreeMap::keys) {
                if to == start {
                    let mut way = vec![start.clone(), at.clone()];
                    while way[way.len() - 1] != *start {
                        way.push(from[&way[way.len() - 1]].clone());
                    }
                    way.reverse();
                    return Some(way);
                }
                if !from.contains_key(to) {
                    from.insert(to.clone(), at.clone());
                    left.push_back(to.clone());
                }
            }
        }
        None
    };
    let way = modules.keys().filter_map(back_to).min_by_key(Vec::len)?;
    let mut out = String::new();
    for pair in way.windows(2) {
        let (file, line) = (&modules[&pair[0]].file, steps[&pair[0]][&pair[1]]);
        let [from, to] = [0, 1].map(|n| [&["crate".to_owned()], &pair[n][..]].concat().join("::"));
        writeln!(out, "{file}:{line}: {from} -> {to}").unwrap();
    }
    Some(out)
}

#[test]
fn modules_stand_in_no_circle() {
    let sources = sources();
    let mut faults = String::new();
    for name in CRATES {
        let modules = modules(&sources, &format!("crates/{name}/src/lib.rs"));
        assert!(modules.len() > 20, "{name}: only {} modules were found", modules.len());
        if let Some(circle) = circle(&modules) {
            writeln!(faults, "{name}: a circle of modules\n{circle}").unwrap();
        }
    }
    report(&faults);
}

#[test]
fn nothing_above_a_device_names_a_runner() {
    let mut faults = String::new();
    let mut asking = Vec::new();
    for source in sources().iter().filter(|s| s.is_library()) {
        if !ABOVE.iter().any(|name| source.path.starts_with(&format!("crates/{name}/"))) {
            continue;
        }
        let code = without_tests(&code_only(source.text()));
        for (line, path) in paths(&code) {
            let runner = path[1];
            if path[0] != "kie_kernels" || !RUNNERS.contains(&runner) {
                continue;
            }
            match ASKING.iter().find(|file| **file == source.path) {
                Some(file) => asking.push(*file),
                None => writeln!(faults, "{}:{line}: names {runner}", source.path).unwrap(),
            }
        }
    }
    for file in ASKING.iter().filter(|file| !asking.contains(file)) {
        writeln!(faults, "ASKING: {file} names no runner, drop the row").unwrap();
    }
    report(&faults);
}

#[test]
fn circles_are_seen() {
    let file = |path: &str, text: &str| Source {
        path: path.to_owned(),
        bytes: text.len() as u64,
        text: Some(text.to_owned()),
    };
    let crate_of = |a: &str, b: &str| {
        let root = "mod a;\npub mod b;\n#[cfg(test)]\nmod tests;\npub use a::A;\n";
        let all = [file("x/lib.rs", root), file("x/a/mod.rs", a), file("x/b.rs", b)];
        circle(&modules(&all, "x/lib.rs"))
    };
    let paths_of: Vec<_> = paths("use a::{b, c::{d, self}, e::*};\nx::y::<u8>(z)")
        .into_iter()
        .map(|(line, path)| format!("{line} {}", path.join("::")))
        .collect();
    assert_eq!(paths_of, ["1 a::b", "1 a::c::d", "1 a::c::self", "1 a::e", "2 x::y"]);
    let there = "//! A.\n\nuse std::{fmt, io};\nuse crate::{\n    b::{B, C},\n};\n";
    let circle = "x/a/mod.rs:4: crate::a -> crate::b\nx/b.rs:1: crate::b -> crate::a\n";
    assert_eq!(crate_of(there, "fn f(a: super::a::A) {}").as_deref(), Some(circle));
    let root = "x/lib.rs:5: crate -> crate::a\nx/a/mod.rs:1: crate::a -> crate\n";
    assert_eq!(crate_of("use crate::A;", "").as_deref(), Some(root));
    let test = "#[cfg(test)]\n#[allow(x)]\nmod tests {\n    use super::super::a::A;\n}\n";
    for harmless in ["// use crate::a::A;", "const A: &str = \"crate::a::A\";", test, "use a::A;"] {
        assert_eq!(crate_of(there, harmless), None, "{harmless}");
    }
}
