//! The house rules, as tests: sizes, module headers, banned words, edges of crates and of modules,
//! where `unsafe` may stand, and what the tree may weigh. CONTRIBUTING.md says them in prose.
//!
//! Invariants: a rule fails with file, line, wanted and got. Exceptions are listed by name, each
//! with its present size, and a list may only shrink: an entry that is no longer needed also fails.
#![allow(clippy::unwrap_used)]

#[path = "tidy/modules.rs"]
mod modules;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const LINE_CHARS_MAX: usize = 100;
const FILE_LINES_MAX: usize = 1_000;
const FUNCTION_LINES_MAX: usize = 70;
const KERNEL_FUNCTION_LINES_MAX: usize = 120;
const TREE_BYTES_MAX: u64 = 45_000_000;

/// Functions longer than the limit: (file, function, lines). Lower a number when the function
/// shrinks, drop the row when it fits; never add or raise one.
const LONG_FUNCTIONS: &[(&str, &str, usize)] = &[];

/// Files of the safe crates in which `unsafe` may stand.
const UNSAFE_FILES: &[&str] = &[
    "crates/kie-core/src/ring.rs",
    // What ring.rs is made of (sleep, descriptor, cells), apart so that loom can take its place.
    "crates/kie-core/src/primitive.rs",
    "crates/kie-core/src/descriptor.rs",
    // The device half of the mailbox, in a test.
    "crates/kie-core/src/engine/fake.rs",
    "crates/kie-core/src/weights/safetensors.rs",
    // SIGBUS where a mapped file is cut short.
    "crates/kie-core/src/weights/guard.rs",
    "crates/kie-kccl/src/symmetric.rs",
    // The stream's descriptor in tokio's reactor, whose registration is unsafe.
    "crates/kie-server/src/tokens.rs",
];

/// Files of kie-kernels that make a `&mut` of memory which several threads, or a device, may touch:
/// there stands why nobody else is at it.
const SHARED_MEMORY_FILES: &[&str] = &[
    // Disjoint parts of a team's memory.
    "crates/kie-kernels/src/field.rs",
    // A slot's request, which host and device have in turn.
    "crates/kie-kernels/src/mailbox.rs",
    // Pinned memory before the driver is told to read it.
    "crates/kie-kernels/src/gpu/staging.rs",
];

/// What only Linux has: words of `libc`, each with the files in which it may stand. There, other
/// systems have another way.
const LINUX_ONLY: &[(&str, &[&str])] = &[
    ("libc::SYS_futex", &["crates/kie-kernels/src/park.rs"]),
    ("libc::SYS_arch_prctl", &["crates/kie-kernels/src/simd/x86.rs"]),
    ("libc::eventfd", &["crates/kie-core/src/descriptor.rs"]),
    ("libc::memfd_create", &["crates/kie-kernels/src/sim/memory.rs"]),
    ("libc::sched_getaffinity", &["crates/kie-kernels/src/cpu/team.rs"]),
    ("libc::sched_setaffinity", &["crates/kie-kernels/src/cpu/team.rs"]),
    ("libc::pthread_getcpuclockid", &["crates/kie-kernels/src/cpu/team.rs"]),
    ("libc::mallopt", &["crates/kie-kernels/src/limits.rs"]),
    ("libc::_SC_AVPHYS_PAGES", &[]),
    ("libc::MADV_HUGEPAGE", &["crates/kie-kernels/src/cpu/arena.rs"]),
    ("libc::__errno_location", &["crates/kie-core/src/weights/guard.rs"]),
    ("libc::epoll_create1", &[]),
    ("libc::signalfd", &[]),
    ("libc::timerfd_create", &[]),
    ("libc::prctl", &[]),
    ("libc::gettid", &[]),
    ("libc::pipe2", &[]),
    ("libc::mremap", &[]),
    ("libc::MAP_POPULATE", &[]),
];

/// Crates and what they may depend on in this workspace.
const EDGES: &[(&str, &[&str])] = &[
    // gcn: of tests alone, which is what it is for.
    ("kie-kernels", &["kie-gcn"]),
    ("kie-gcn", &["kie-kernels"]),
    ("kie-kccl", &["kie-gcn", "kie-kernels"]),
    ("kie-core", &["kie-gcn", "kie-kccl", "kie-kernels"]),
    // kernels: a device of a fixed pace, in an example.
    ("kie-server", &["kie-core", "kie-kernels"]),
    ("kie-py", &["kie-core", "kie-kccl", "kie-kernels", "kie-server"]),
];

/// A tracked or new file: its path from the root, with `/`, and its text where it is UTF-8.
struct Source {
    path: String,
    bytes: u64,
    text: Option<String>,
}

impl Source {
    fn text(&self) -> &str {
        self.text.as_deref().unwrap_or("")
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_kernel(&self) -> bool {
        self.path.starts_with("kernels/")
            && [".h", ".cu", ".hip"].iter().any(|end| self.path.ends_with(end))
    }

    fn is_python(&self) -> bool {
        self.path.ends_with(".py") || self.path.ends_with(".pyi")
    }

    fn is_library(&self) -> bool {
        self.is_rust() && self.path.starts_with("crates/") && self.path.contains("/src/")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every file that git tracks or would add. Links are left out: their target is there itself.
fn sources() -> Vec<Source> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git lists the tree");
    assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let mut found = Vec::new();
    for path in String::from_utf8(listed.stdout).unwrap().split_terminator('\0') {
        let full = root().join(path);
        let Ok(meta) = full.symlink_metadata() else { continue };
        if meta.is_file() {
            let text = String::from_utf8(std::fs::read(&full).unwrap()).ok();
            found.push(Source { path: path.into(), bytes: meta.len(), text });
        }
    }
    assert!(
        found.iter().any(|s| s.path == "tests/tidy.rs"),
        "the list of files is not this tree's"
    );
    found
}

/// Fail with every line of `faults`.
fn report(faults: &str) {
    assert!(faults.is_empty(), "\n{faults}");
}

/// True where `text` has `word` at `at` with no identifier character on either side.
fn is_word_at(text: &str, at: usize, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part)
}

/// Line numbers, from 1, on which `word` stands by itself.
fn lines_with(text: &str, word: &str) -> Vec<usize> {
    text.match_indices(word)
        .filter(|&(at, _)| is_word_at(text, at, word))
        .map(|(at, _)| text[..at].matches('\n').count() + 1)
        .collect()
}

/// Rust or C++ with comments and the contents of strings and characters blanked out. Keeps lines.
fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match skip_from(bytes, at) {
            Some(end) => end,
            None => {
                at += 1;
                continue;
            }
        };
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    String::from_utf8(out).expect("whole strings and comments were replaced by spaces")
}

/// Where the comment, string or character literal that begins at `at` ends; None if none begins.
fn skip_from(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let find = |from: usize, what: &[u8]| {
        let place = rest[from..].windows(what.len()).position(|w| w == what);
        place.map_or(bytes.len(), |n| at + from + n + what.len())
    };
    let after_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => Some(find(2, b"\n") - usize::from(find(2, b"\n") < bytes.len())),
        [b'/', b'*', ..] => Some(find(2, b"*/")),
        [b'r', b'"' | b'#', ..] if !after_word => {
            let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
            let closing: Vec<u8> = std::iter::once(b'"').chain(vec![b'#'; hashes]).collect();
            (rest.get(1 + hashes) == Some(&b'"')).then(|| find(2 + hashes, &closing))
        }
        [b'"', ..] => Some(quoted_end(bytes, at)),
        [b'\'', b'\\', ..] => Some(quoted_end(bytes, at)),
        // A character, not a lifetime: the closing quote follows one (possibly wide) character.
        [b'\'', first, ..] => {
            let width = match first {
                0xF0.. => 4,
                0xE0.. => 3,
                0xC0.. => 2,
                _ => 1,
            };
            (rest.get(1 + width) == Some(&b'\'')).then_some(at + width + 2)
        }
        _ => None,
    }
}

/// End of the literal that opens at `at`, backslash escapes honoured.
fn quoted_end(bytes: &[u8], at: usize) -> usize {
    let mut i = at + 1;
    while i < bytes.len() && bytes[i] != bytes[at] {
        i += 1 + usize::from(bytes[i] == b'\\');
    }
    (i + 1).min(bytes.len())
}

/// (line, name, lines) of every function with a body in blanked Rust.
fn rust_functions(code: &str) -> Vec<(usize, String, usize)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ").filter(|&(at, _)| is_word_at(code, at, "fn")) {
        let name: String =
            code[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        // A `;` outside brackets before the body: a declaration without one, or a function type.
        let mut depth = 0_i32;
        let body = code[at..].find(|c| {
            depth += i32::from("([".contains(c)) - i32::from(")]".contains(c));
            depth <= 0 && (c == '{' || c == ';')
        });
        let Some(open) = body.map(|n| at + n).filter(|&n| code.as_bytes()[n] == b'{') else {
            continue;
        };
        if !name.is_empty() {
            let line = code[..at].matches('\n').count() + 1;
            found.push((line, name, code[at..block_end(code, open)].matches('\n').count() + 1));
        }
    }
    found
}

/// (line, first line, lines) of every outermost block of blanked C++ that follows a `)`.
fn kernel_functions(code: &str) -> Vec<(usize, String, usize)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(open) = code[from..].find('{').map(|n| from + n) {
        let start = code[..open].rfind([';', '}', '{']).map_or(0, |n| n + 1);
        let head = code[start..open].trim();
        if head.contains('(') && !head.ends_with('=') {
            let end = block_end(code, open);
            let line = code[..open].matches('\n').count() + 1;
            let name = head.split('(').next().unwrap_or("").split_whitespace().last();
            let lines = code[open..end].matches('\n').count() + 1;
            found.push((line, name.unwrap_or("?").to_owned(), lines));
            from = end;
        } else {
            from = open + 1;
        }
    }
    found
}

/// One past the brace that closes the one at `open`.
fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, c) in code[open..].char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if depth == 0 {
            return open + at + 1;
        }
    }
    code.len()
}

/// (line, name, lines) of every Python function, by indentation.
fn python_functions(text: &str) -> Vec<(usize, String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let head = line.trim_start().trim_start_matches("async ");
        if let Some(rest) = head.strip_prefix("def ") {
            let inside = |l: &&&str| {
                l.trim().is_empty() || indent(l) > indent(line) || l.trim_start().starts_with(')')
            };
            let body: Vec<_> = lines[n + 1..].iter().take_while(inside).collect();
            let blank = body.iter().rev().take_while(|l| l.trim().is_empty()).count();
            let name = rest.split('(').next().unwrap_or("").to_owned();
            found.push((n + 1, name, 1 + body.len() - blank));
        }
    }
    found
}

#[test]
fn lines_and_files_are_short() {
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.is_rust() || s.is_kernel() || s.is_python()) {
        let count = source.text().lines().count();
        if count > FILE_LINES_MAX {
            writeln!(faults, "{}: {count} lines, at most {FILE_LINES_MAX}", source.path).unwrap();
        }
        for (n, line) in source.text().lines().enumerate().filter(|_| !source.is_python()) {
            let chars = line.chars().count();
            if chars > LINE_CHARS_MAX {
                writeln!(faults, "{}:{}: {chars} characters", source.path, n + 1).unwrap();
            }
        }
    }
    report(&faults);
}

#[test]
fn functions_are_short() {
    let mut faults = String::new();
    let mut listed: BTreeMap<(String, String), usize> = LONG_FUNCTIONS
        .iter()
        .map(|&(file, name, lines)| ((file.to_owned(), name.to_owned()), lines))
        .collect();
    for source in &sources() {
        let (functions, most) = match source.path.as_str() {
            _ if source.is_rust() => {
                (rust_functions(&code_only(source.text())), FUNCTION_LINES_MAX)
            }
            _ if source.is_python() => (python_functions(source.text()), FUNCTION_LINES_MAX),
            _ if source.is_kernel() => {
                (kernel_functions(&code_only(source.text())), KERNEL_FUNCTION_LINES_MAX)
            }
            _ => continue,
        };
        for (line, name, lines) in functions.into_iter().filter(|f| f.2 > most) {
            let known = listed.remove(&(source.path.clone(), name.clone()));
            if known != Some(lines) {
                let want = known.unwrap_or(most);
                writeln!(faults, "{}:{line}: {name} has {lines} lines, not {want}", source.path)
                    .unwrap();
            }
        }
    }
    for (file, name) in listed.keys() {
        writeln!(faults, "LONG_FUNCTIONS: {name} of {file} fits now, drop the row").unwrap();
    }
    report(&faults);
}

#[test]
fn modules_say_what_they_are() {
    let mut faults = String::new();
    for source in &sources() {
        let opening = match source.path.as_str() {
            _ if source.is_rust() => "//!",
            path if source.is_python() && !path.contains("/primer/") => "\"\"\"",
            _ if source.is_kernel() => "//",
            _ => continue,
        };
        let text = source.text();
        let text = if text.starts_with("#!/") { text.split_once('\n').unwrap().1 } else { text };
        if !text.starts_with(opening) {
            writeln!(faults, "{}: does not open with {opening}", source.path).unwrap();
        }
    }
    report(&faults);
}

#[test]
fn libraries_have_no_left_overs() {
    let banned = ["todo!", "unimplemented!", "dbg!", "println!", "print!"];
    let statements = ["let ", "use ", "fn ", "pub ", "if ", "for ", "return ", "self."];
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.is_library()) {
        let code = code_only(source.text());
        for word in banned {
            for line in lines_with(&code, word) {
                writeln!(faults, "{}:{line}: {word}", source.path).unwrap();
            }
        }
        for (n, line) in source.text().lines().enumerate() {
            let comment = line.trim_start().strip_prefix("// ").unwrap_or("");
            let begins = statements.iter().any(|s| comment.starts_with(s));
            if begins && (comment.ends_with(';') || comment.ends_with('{')) {
                writeln!(faults, "{}:{}: code in a comment", source.path, n + 1).unwrap();
            }
        }
    }
    report(&faults);
}

/// These panic where the system has no thread to give; `std::thread::Builder` says so.
#[test]
fn threads_that_cannot_be_had_are_no_panic() {
    let is_test = |path: &str| path.contains("test") || path.ends_with("/loomed.rs");
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.is_library() && !is_test(&s.path)) {
        let code = code_only(source.text());
        let code = code.split("mod tests {").next().unwrap_or("");
        for line in ["scope.spawn", "thread::spawn"].iter().flat_map(|w| lines_with(code, w)) {
            writeln!(faults, "{}:{line}: a thread that may not be had", source.path).unwrap();
        }
    }
    report(&faults);
}

#[test]
fn unsafe_stands_only_in_the_named_files() {
    let safe_crates =
        ["crates/kie-core/", "crates/kie-kccl/", "crates/kie-server/", "crates/kie-py/"];
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.is_rust()) {
        let guarded = safe_crates.iter().any(|part| source.path.starts_with(part));
        if guarded && !UNSAFE_FILES.contains(&source.path.as_str()) {
            for line in lines_with(&code_only(source.text()), "unsafe") {
                writeln!(faults, "{}:{line}: unsafe", source.path).unwrap();
            }
        }
    }
    report(&faults);
}

#[test]
fn shared_memory_is_borrowed_only_in_the_named_files() {
    // An import would hide the second.
    let (cells, slices) = ("UnsafeCell", "slice::from_raw_parts_mut");
    let mut faults = String::new();
    let mut borrowing = Vec::new();
    for source in sources().iter().filter(|s| s.path.starts_with("crates/kie-kernels/src/")) {
        let code = code_only(source.text());
        let borrows = code.lines().any(|l| l.contains("&mut *") && l.contains(".get()"));
        let lines = lines_with(&code, "from_raw_parts_mut");
        if borrows && code.contains(cells) || code.contains(slices) {
            borrowing.push(source.path.clone());
        }
        if !SHARED_MEMORY_FILES.contains(&source.path.as_str()) {
            for line in lines {
                writeln!(faults, "{}:{line}: a `&mut [T]` of shared memory", source.path).unwrap();
            }
            if borrows {
                writeln!(faults, "{}: a `&mut` out of a cell", source.path).unwrap();
            }
        }
    }
    for file in SHARED_MEMORY_FILES {
        if !borrowing.iter().any(|path| path == file) {
            writeln!(faults, "{file}: listed, and borrows nothing").unwrap();
        }
    }
    report(&faults);
}

#[test]
fn what_only_linux_has_stands_behind_a_seam() {
    let mut faults = String::new();
    // The drivers of GPUs are compiled on Linux alone.
    let elsewhere = |path: &str| {
        !path.starts_with("crates/kie-kernels/src/cuda/")
            && !path.starts_with("crates/kie-kernels/src/hip/")
    };
    for source in sources().iter().filter(|s| s.is_library() && elsewhere(&s.path)) {
        for (word, files) in LINUX_ONLY {
            let seam = files.contains(&source.path.as_str())
                && source.text().contains("target_os = \"linux\"");
            for line in lines_with(source.text(), word).iter().filter(|_| !seam) {
                writeln!(faults, "{}:{line}: {word} outside a seam", source.path).unwrap();
            }
        }
    }
    report(&faults);
}

/// `kie-*` names on the left of a dependency table of a Cargo.toml, dev-dependencies included.
fn edges_of(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end_matches(']');
            inside = table.ends_with("dependencies");
            if let Some((_, name)) = table.split_once("dependencies.") {
                found.push(name.trim_matches('"').to_owned());
            }
        } else if inside && !line.starts_with('#') {
            found.push(line.split(['.', '=', ' ']).next().unwrap_or("").to_owned());
        }
    }
    found.retain(|name| name.starts_with("kie-"));
    found
}

#[test]
fn crates_depend_only_downwards() {
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.path.ends_with("/Cargo.toml")) {
        let name = source.path.split('/').nth(1).unwrap();
        let Some((_, allowed)) = EDGES.iter().find(|(known, _)| *known == name) else {
            writeln!(faults, "{}: not in EDGES", source.path).unwrap();
            continue;
        };
        for edge in edges_of(source.text()).iter().filter(|e| !allowed.contains(&e.as_str())) {
            writeln!(faults, "{}: depends on {edge}, allowed {allowed:?}", source.path).unwrap();
        }
    }
    report(&faults);
}

/// What `kernels/common` includes from elsewhere: the platform's files and the generated header.
const SEAM: [&str; 4] = ["platform.h", "tile.h", "wide.h", "lowered.h"];

#[test]
fn common_kernels_name_no_vendor() {
    let vendors = ["__CUDA", "__HIP", "__AMD", "__NV", "cuda", "hip", "rocm", "nvidia"];
    let mut faults = String::new();
    for source in sources().iter().filter(|s| s.is_kernel()) {
        let code = code_only(source.text());
        for (n, line) in code.lines().enumerate() {
            let vendor = vendors.iter().any(|v| line.contains(v));
            let assembly = !lines_with(line, "asm").is_empty() || line.contains("__asm");
            if source.path.starts_with("kernels/common/") && (vendor || assembly) {
                writeln!(faults, "{}:{}: vendor or assembly", source.path, n + 1).unwrap();
            }
        }
        for line in source.text().lines().filter_map(|l| l.trim().strip_prefix("#include")) {
            let name = line.trim().trim_matches('"');
            let inside = SEAM.contains(&name) || root().join("kernels/common").join(name).is_file();
            if source.path.starts_with("kernels/common/") && !inside {
                writeln!(faults, "{}: includes {name}", source.path).unwrap();
            }
        }
    }
    report(&faults);
}

#[test]
fn the_tree_stands_by_itself() {
    // Written in two halves so that this file does not hold the words it looks for.
    let foreign = [concat!("../sha", "red"), concat!("/work/", "sha"), concat!("/root/", ".cargo")];
    let mut faults = String::new();
    let mut total = 0;
    for source in &sources() {
        total += source.bytes;
        for word in foreign.iter().filter(|word| source.text().contains(**word)) {
            writeln!(faults, "{}: mentions {word}", source.path).unwrap();
        }
    }
    if total >= TREE_BYTES_MAX {
        writeln!(faults, "the tree has {total} bytes, at most {TREE_BYTES_MAX}").unwrap();
    }
    report(&faults);
}

#[test]
fn the_rules_see_what_they_look_for() {
    let code =
        code_only("fn a<'x>() -> &'x str {\n  \"} fn b() {\" // }\n}\nlet c = '{'; r#\"\"{\"#\n");
    assert_eq!(code.matches('\n').count(), 4);
    assert_eq!(rust_functions(&code), [(1, "a".to_owned(), 3)]);
    assert!(rust_functions("fn f(g: fn(u8) -> [u8; 2]);").is_empty());
    assert_eq!(python_functions("def f(\n    a,\n):\n    pass\n\n\nx = 1\n")[0].2, 4);
    let kernel = "namespace k {\nvoid f(int a) {\n  if (a) {\n  }\n}\nstruct S { int a; };\n}\n";
    assert_eq!(kernel_functions(kernel), [(2, "f".to_owned(), 4)]);
    assert_eq!(lines_with("println!\neprintln! print!", "print!"), [2]);
    assert_eq!(lines_with("unsafe_code\nunsafe {", "unsafe"), [2]);
    let manifest =
        "[dependencies]\nkie-kccl.workspace = true\nlibc = \"0.2\"\n[dependencies.kie-py]";
    assert_eq!(edges_of(manifest), ["kie-kccl", "kie-py"]);
}
