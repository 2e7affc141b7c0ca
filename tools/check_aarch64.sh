#!/usr/bin/env bash
# Type-checks all crates for aarch64, Linux and macOS: tools/check_aarch64.sh [FOLDER]
#
# The compiler is Debian's rustc-web. Linux's standard library is Debian's, too; macOS' is built from
# the source that Debian has of it. C is compiled by zig. All of it goes into FOLDER (target/aarch64)
# and nothing is installed. Nothing runs.
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
    apt-get download rustc-web "$std" "$versioned" "$llvm" rust-web-src
    for url in $urls; do
        curl --fail --silent --show-error --remote-name "${url/_amd64.deb/_arm64.deb}"
    done
    for package in *.deb; do dpkg --extract "$package" "$work/root"; done
    # Where cargo looks for it.
    mkdir -p "$work/root/usr/lib/rustlib/src"
    ln -sfn "$work"/root/usr/src/rustc-* "$work/root/usr/lib/rustlib/src/rust"
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
for system in linux-gnu macos; do
    cat > "$work/cc-$system" << END
#!/bin/bash
# Rust's words for the target are none of zig's.
for word; do
    shift
    case \$word in
        --target=* | -mmacosx-version-min=* | -arch | arm64) ;;
        *) set -- "\$@" "\$word" ;;
    esac
done
exec $work/zig/bin/python -m ziglang cc -target aarch64-$system "\$@"
END
done
printf '#!/bin/bash\nexec %s/zig/bin/python -m ziglang ar "$@"\n' "$work" > "$work/ar"
chmod +x "$work"/{rustc,cc-linux-gnu,cc-macos,ar}

export RUSTC=$work/rustc CARGO_TARGET_DIR=${TARGET:-$work/target}
export PYO3_CROSS=1 PYO3_CROSS_PYTHON_VERSION=3.11
export CC_aarch64_unknown_linux_gnu=$work/cc-linux-gnu AR_aarch64_unknown_linux_gnu=$work/ar
export CC_aarch64_apple_darwin=$work/cc-macos AR_aarch64_apple_darwin=$work/ar
check=(cargo check --workspace --features kie-server/otlp --locked)
"${check[@]}" --target aarch64-unknown-linux-gnu
# A released compiler builds its own standard library only where it takes itself for a nightly.
RUSTC_BOOTSTRAP=1 "${check[@]}" -Z build-std=std,panic_abort --target aarch64-apple-darwin
