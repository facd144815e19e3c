# Functions that create the environment and count the cores. The programs in this folder source this
# file.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=run/$(basename "$0")

say() { printf '%s: %s\n' "$program" "$*" >&2; }

die() { # print one line and exit with code 2, which means unusable options
    say "$*"
    exit 2
}

watched() { # watched TEXT LOG COMMAND...: run a command, output to LOG; show the elapsed time
    local text=$1 log=$2 code=0 start=$SECONDS
    shift 2
    : >"$log"
    watch_command "$text" "$log" &
    watcher=$!
    trap end_watcher EXIT # in case Ctrl-C ends the command
    "$@" >"$log" 2>&1 || code=$?
    end_watcher
    trap - EXIT
    [ $((SECONDS - start)) -lt 2 ] || [ $code != 0 ] || say "$text: done ($((SECONDS - start)) s)"
    return $code
}

watch_command() { # watch_command TEXT LOG: show TEXT, the seconds and the last line of LOG
    # A terminal gets one line, updated every second. Other outputs get a new line every 9 seconds.
    local start=$SECONDS shown=$SECONDS line
    # $$ is this program, which may be killed. `sleep` must not keep its pipes open.
    while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        line="$program: $1 ($((SECONDS - start)) s)"
        [ ! -s "$2" ] || line="$line: $(tail -n 1 "$2" | sed 's/^ *//; s/: started$//')"
        if [ -t 2 ]; then
            printf '\r%.*s\033[K' $((${COLUMNS:-80} - 1)) "$line" >&2
        elif [ $((SECONDS - shown)) -ge 9 ]; then
            shown=$SECONDS
            printf '%.79s\n' "$line" >&2
        fi
    done
}

end_watcher() { # end the background process of `watched`, and erase its line on a terminal
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [ ! -t 2 ] || printf '\r\033[K' >&2
}

choose_environment() { # set venv, the folder of the environment, and mpi, the kind of MPI
    case ${MPIDL_MPI:-mpich} in
    openmpi) venv=$root/.venv-openmpi ;;
    mpich | system) venv=$root/.venv ;;
    *) die "MPIDL_MPI: expected mpich, openmpi or system, found '$MPIDL_MPI'" ;;
    esac
    venv=${MPIDL_VENV:-$venv}
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    local held=""
    [ ! -r "$venv/mpidl-mpi" ] || held=$(<"$venv/mpidl-mpi")
    mpi=${MPIDL_MPI:-${held:-mpich}}
    # With two MPIs in one environment, each MPI would load libraries of the other.
    [ -z "$held" ] || [ "$held" = "$mpi" ] ||
        die "$venv was created with MPI '$held', not '$mpi': name another folder in MPIDL_VENV"
}

use_environment() { # put the environment first on PATH and set variables for Python and MPI
    PATH=$venv/bin:$PATH # otherwise mpirun would start another Python
    export PATH
    unset PYTHONDONTWRITEBYTECODE # otherwise each process compiles the package again
    unset PYTHONUNBUFFERED # otherwise line ends are written separately, and the ranks' lines mix
    if [ "$mpi" != mpich ]; then # Open MPI refuses root and more ranks than cores by default
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
        export OMPI_MCA_rmaps_base_oversubscribe=1
    fi
}

installed() { # print the stamp of an up-to-date environment: checkout, MPI, Python, setup files
    printf '%s %s %s ' "$root" "$mpi" "$("$venv/bin/python" -V 2>&1)"
    cat "$root/setup.cfg" "$root/pyproject.toml" "$root/setup.py" | sha256sum
}

is_ready() { # is_ready train|test: succeed if the environment is up to date
    [ -x "$venv/bin/python" ] && [ -r "$venv/mpidl-$1" ] &&
        [ "$(<"$venv/mpidl-$1")" = "$(installed)" ]
}

prepare() { # prepare train|test: create or update the environment if necessary, then use it
    choose_environment
    if ! is_ready "$1"; then
        lock
        is_ready "$1" || set_up "$1" ""
        unlock
    fi
    use_environment
    compile_kernels
}

compile_kernels() { # compile if the sources have changed; on failure, mpidl uses NumPy
    "$venv/bin/python" "$root/kernels/build.py" --if-needed || true
}

lock() { # wait until no other program in this checkout changes the environment
    exec 9<"$root"
    ! command -v flock >/dev/null || flock 9 2>/dev/null || true
}

unlock() { exec 9<&-; }

set_up() { # set_up train|test EXTRAS [PIP OPTION...]: create the environment, install mpidl
    make_environment
    compile_kernels # before pip, which hides the progress of the compiler
    install_package "$@"
}

make_environment() { # create the environment unless it has pip and a new enough Python
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python clear=""
    if [ -e "$venv/pyvenv.cfg" ]; then
        clear=--clear # its Python is missing, or the environment is incomplete
    elif [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        die "$venv is not empty and has no Python >= 3.10 with pip: set MPIDL_VENV to another folder"
    fi
    python=$(find_python) || die "Python 3.10 or newer is missing ($python)"
    "$python" -c 'import ensurepip, venv; ensurepip.version()' 2>/dev/null ||
        die "Python's venv module is missing: apt-get install ${python##*/}-venv"
    say "creating $venv (once) with MPI '$mpi'"
    local output
    output=$(mktemp) || die "cannot create a file in ${TMPDIR:-/tmp}"
    if ! watched "creating the environment" "$output" "$python" -m venv $clear "$venv"; then
        local reason
        reason=$(tail -n 1 "$output")
        rm -f "$output"
        die "cannot create $venv: $reason (MPIDL_VENV names another folder)"
    fi
    rm -f "$output"
}

find_python() { # print the first Python that is new enough; if there is none, print advice and fail
    local name version found="apt-get install python3 python3-venv"
    for name in ${MPIDL_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "$name"
            return
        fi
        found="$name is $version: apt-get install python3.10 python3.10-venv, or a newer system"
    done
    echo "$found"
    return 1
}

extras_of() { # extras_of train|test EXTRAS: print the extras to install, in brackets
    local all=$2
    [ "$mpi" = system ] || all=$mpi${all:+,$all}
    [ "$1" = train ] || all=${all:+$all,}$1
    echo "${all:+[$all]}"
}

install_package() { # install_package train|test EXTRAS [PIP OPTION...]
    local kind=$1 extras log=$venv/mpidl-install.log
    extras=$(extras_of "$kind" "$2")
    shift 2
    # Tests import few modules, so Python compiles each module at its first import.
    [ "$kind" = train ] || set -- --no-compile "$@"
    # An editable installation runs the checkout itself, even after a `git pull`.
    watched "installing packages" "$log" pip_in_root install "$@" -e ".$extras" ||
        explain_pip "$log"
    find_checkout_first
    [ "$mpi" != system ] || link_system_mpi
    echo "$mpi" >"$venv/mpidl-mpi"
    installed >"$venv/mpidl-$kind"
    [ "$kind" = train ] || cp "$venv/mpidl-$kind" "$venv/mpidl-train"
}

link_system_mpi() { # let mpi4py find the machine's MPI, and store its ABI for the job scripts
    local log=$venv/mpidl-mpi.log
    if ! "$venv/bin/python" "$root/run/link_mpi.py" >"$venv/mpidl-abi" 2>"$log"; then
        rm -f "$venv/mpidl-train" "$venv/mpidl-test" # stamps of an earlier installation
        die "--system-mpi: $(tail -n 1 "$log")"
    fi
    [ ! -s "$log" ] || say "$(tail -n 1 "$log")"
}

add_extra() { # add_extra EXTRA: install the packages of an extra of setup.cfg if they are missing
    if ! has_extra "$1"; then
        lock
        has_extra "$1" || install_extra "$1"
        unlock
    fi
}

has_extra() {
    local stamp=$venv/mpidl-extra-$1
    [ -r "$stamp" ] && [ "$(<"$stamp")" = "$(installed)" ]
}

install_extra() {
    local log=$venv/mpidl-install.log requirements
    requirements=$(mktemp)
    (cd "$root" && "$venv/bin/python" -c 'import configparser, sys
config = configparser.ConfigParser()
config.read("setup.cfg")
print(config["options.extras_require"][sys.argv[1]])' "$1" >"$requirements")
    watched "installing the extra '$1'" "$log" pip_in_root install -r "$requirements" ||
        explain_pip "$log"
    rm -f "$requirements"
    installed >"$venv/mpidl-extra-$1"
}

pip_in_root() { # pip_in_root COMMAND [ARGUMENT...]: run pip of the environment in the checkout
    local command=$1
    shift
    (cd "$root" && PIP_RETRIES=${PIP_RETRIES:-2} exec "$venv/bin/python" -m pip "$command" \
        --disable-pip-version-check --no-input "$@")
}

find_checkout_first() { # let "import mpidl" find the checkout before a folder of this name
    # The finder of an editable installation comes after the current folder. If that folder contains
    # the checkout as "mpidl", Python would import an empty namespace package. Python prefers a
    # regular package on its path, so the checkout is added to the path. The finder is then
    # superfluous. It is removed, because it makes 200 file-system calls in each Python process.
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$root" >"$packages/mpidl-checkout.pth"
    rm -f "$packages"/__editable__.mpidl-*.pth
}

explain_pip() { # explain_pip LOG: print a line that explains why pip failed, and exit
    local offline='NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|unreachable'
    if grep -qE "$offline|Failed to establish|Connection refused" "$1"; then
        die "pip cannot reach the package index; without internet: run/install --help (log: $1)"
    fi
    local error
    error=$(grep -iE '^ *error: ' "$1" | grep -v subprocess-exited | head -n 1) || true
    error=${error#"${error%%[! ]*}"} # remove leading spaces
    die "pip failed: ${error:-$(tail -n 1 "$1")} (log: $1)"
}

count_cores() { # count_cores [CGROUPS]: print the number of usable cores, given affinity and quota
    local cores quota="" period="" cgroups=${1:-/sys/fs/cgroup}
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    { read -r quota period <"$cgroups/cpu.max"; } 2>/dev/null || # cgroups version 2 or 1
        { read -r quota <"$cgroups/cpu/cpu.cfs_quota_us" &&
            read -r period <"$cgroups/cpu/cpu.cfs_period_us"; } 2>/dev/null || true
    # "max" (version 2) or -1 (version 1) means that there is no quota.
    if [[ $quota =~ ^[0-9]+$ && $period =~ ^[1-9][0-9]*$ ]] &&
        [ $((quota / period)) -lt "$cores" ]; then
        cores=$((quota / period))
    fi
    echo $((cores > 0 ? cores : 1))
}
