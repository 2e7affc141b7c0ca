#!/usr/bin/env bash
# Type-checks all crates for aarch64-unknown-linux-gnu: tools/check_aarch64.sh [FOLDER]
#
# Standard library and compiler are Debian's rustc-web (amd64 with the arm64 library beside it), C is
# compiled by zig; all of it goes into FOLDER (target/aarch64) and nothing is installed. Nothing runs.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(realpath -m "${1:-target/aarch64}")
mkdir -p "$work/debs" "$work/root"

if [ ! -x "$work/root/usr/bin/rustc" ]; then
    cd "$work/debs"
    std=$(apt-cache depends rustc-web | awk '/libstd-rust-web-dev/ {print $NF; exit}')
    versioned=$(apt-cache depends "$std" | awk '/Depends: libstd-rust-web-/ {print $NF; exit}')
    llvm=$(apt-cache depends "$versioned" | awk '/libllvm/ {print $NF; exit}')
    # Before they are there: apt names no address of what it has.
    urls=$(apt-get download --print-uris "$std" "$versioned" | cut -d"'" -f2)
    apt-get download rustc-web "$std" "$versioned" "$llvm"
    for url in $urls; do
        curl --fail --silent --show-error --remote-name "${url/_amd64.deb/_arm64.deb}"
    done
    for package in *.deb; do dpkg --extract "$package" "$work/root"; done
    cd - > /dev/null
fi
zig=$(sed -n 's/^ziglang==//p' tools/wheel-requirements.txt)
[ -x "$work/zig/bin/python" ] || python3 -m venv "$work/zig"
"$work/zig/bin/python" -m pip install --quiet "ziglang==$zig"

# The libraries of one compiler must not be found by the other.
cat > "$work/rustc" << END
#!/bin/bash
LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu exec $work/root/usr/bin/rustc "\$@"
END
cat > "$work/cc" << END
#!/bin/bash
# Rust's name of the target is none of zig's.
for word; do shift; [[ \$word == --target=* ]] || set -- "\$@" "\$word"; done
exec $work/zig/bin/python -m ziglang cc -target aarch64-linux-gnu "\$@"
END
printf '#!/bin/bash\nexec %s/zig/bin/python -m ziglang ar "$@"\n' "$work" > "$work/ar"
chmod +x "$work/rustc" "$work/cc" "$work/ar"

RUSTC=$work/rustc CARGO_TARGET_DIR=${TARGET:-$work/target} \
    CC_aarch64_unknown_linux_gnu=$work/cc AR_aarch64_unknown_linux_gnu=$work/ar \
    PYO3_CROSS=1 PYO3_CROSS_PYTHON_VERSION=3.11 \
    cargo check --workspace --features kie-server/otlp --locked --target aarch64-unknown-linux-gnu
