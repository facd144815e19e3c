# Functions of the job scripts train.slurm, sweep.slurm and scaling.slurm. The scripts source this
# file after they have set `script`, `venv` and a trap that sets `asked` when Slurm sends a signal.
# shellcheck shell=bash disable=SC2154

say() { echo "$script: $(date +%FT%T) $*"; }

refuse() { # print one line and exit with code 2, which means unusable options
    say "$*"
    exit 2
}

value_of() { # value_of OPTION ARGUMENT...: print the last value of an option, or nothing
    local option=$1 value="" previous="" word
    shift
    for word; do
        [ "$previous" != "$option" ] || value=$word
        case $word in "$option"=*) value=${word#*=} ;; esac
        previous=$word
    done
    printf '%s\n' "$value"
}

choose_srun_mpi() { # set srun_mpi, the value of srun's --mpi; empty for Slurm's default
    local mpi
    mpi=$(<"$venv/mpidl-mpi")
    # The cluster's MPI works with Slurm's default, unless the default is "none".
    if [ "$mpi" = system ] && scontrol show config 2>/dev/null | grep -q '^MpiDefault *= none'; then
        mpi=$(cat "$venv/mpidl-abi" 2>/dev/null)
    fi
    case $mpi in
    mpich) srun_mpi=pmi2 ;;
    openmpi) srun_mpi=pmix PMIX_MCA_psec=${PMIX_MCA_psec:-native} && export PMIX_MCA_psec ;;
    *) srun_mpi="" ;;
    esac
    srun_mpi=${MPIDL_SRUN_MPI:-$srun_mpi}
    [ -n "$srun_mpi" ] || return 0
    local types # a heading, one type per line, and perhaps a line "versions available: ..."
    types=$(srun --mpi=list 2>&1 | sed '1d; s/^srun://; s/.*://' | tr -s '[:space:],' ' ')
    case " $types " in
    *" $srun_mpi "*) ;;
    *) refuse "srun has no MPI type $srun_mpi (srun --mpi=list:${types% }): name another one in" \
        "MPIDL_SRUN_MPI, or install with the cluster's MPI: run/install --system-mpi" ;;
    esac
}

stop_step() { # trap handler: record Slurm's request to stop, and pass it to a running step
    asked=yes is_interrupted=yes
    [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null
}

run() { # run COMMAND...: run a command, pass requests to stop to it as USR1, and set code
    code=75
    [ -z "$asked" ] || return 0
    "$@" &
    step=$!
    [ -z "$asked" ] || kill -USR1 "$step" 2>/dev/null # for a request before `step` was set
    is_interrupted=yes
    while [ -n "$is_interrupted" ]; do # a signal interrupts `wait`, but not the step
        is_interrupted=""
        wait "$step"
        code=$?
    done
    step=""
}

run_ranks() { # run_ranks MODULE ARGUMENT...: run a module on all tasks; retry once if start fails
    # srun does not inherit --cpus-per-task from the job. With -K, all ranks end if one rank fails.
    # A failing rank waits for the other ranks, because -K would replace their exit codes.
    local task='trap : USR1 TERM; "$@"; code=$?; [ $code = 0 ] || sleep 2; exit $code' before
    local python=(python)
    # A signal that arrives before Python runs stays pending until mpidl takes it (coreutils 8.31).
    ! env --block-signal=USR1,TERM true 2>/dev/null ||
        python=(env --block-signal=USR1,TERM python)
    local ranks=(srun -K ${srun_mpi:+--mpi="$srun_mpi"}
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c "$task" rank "${python[@]}" -m)
    before=$(list_results)
    run "${ranks[@]}" "$@"
    case $code in 0 | 2 | 75) return ;; esac
    read_facts
    if [ -z "$asked" ] && ! is_ending && ! is_preempted && [ "$(list_results)" = "$before" ]; then
        say "exit code $code before anything was written to $out: starting once more"
        run "${ranks[@]}" "$@"
    fi
}

list_results() { # print a checksum of the listing of $out; ignore a killed step's lock
    ls -lAR --full-time --ignore='*run.lock*' "$out" 2>/dev/null | cksum
}

wait_for_slurm() { # wait up to 90 s until Slurm's controller answers
    local end=$((SECONDS + 90))
    until scontrol ping 2>/dev/null | grep -q 'is UP' || [ $SECONDS -ge $end ]; do sleep 2; done
}

read_facts() { facts=$(scontrol --oneliner show job "$job" 2>/dev/null); }

fact() { # fact NAME: print a value that read_facts has read from Slurm, such as JobState
    [[ " $facts" =~ \ $1=([^\ ]*) ]] && printf '%s\n' "${BASH_REMATCH[1]}"
}

# scancel, preemption and requeuing send the same signals. Only these facts distinguish them.
is_ending() { # succeed if Slurm is ending the job, which is false in the grace time of a preemption
    [[ $(fact JobState) =~ ^(COMPLETING|CANCELLED)$ ]]
}

is_preempted() { # preemption may send TERM only to the ranks, and no signal to this script
    [[ $(fact PreemptTime) =~ ^[0-9] ]] && ! [[ $(fact PreemptTime) < $(fact StartTime) ]]
}

finish() { # requeue the job if Slurm stopped it and it can continue; exit with code
    say "exit code $code"
    # Code 75 means a checkpoint. A code above 128 means a signal: the request to stop, if it
    # reached a rank before Python started, or the signal that srun -K sends to ranks that took
    # longer than the other ranks.
    [ $code = 75 ] || [ $code -gt 128 ] || exit $code
    wait_for_slurm # the job must keep its place in the queue even if the controller restarts
    read_facts
    if [ "$(fact Restarts)" != "${SLURM_RESTART_COUNT:-0}" ] && [ -n "$facts" ]; then
        say "Slurm has requeued the job"
    elif is_ending && [ "$(fact Reason)" != TimeLimit ]; then
        say "cancelled: not requeued"
    elif [ -n "$asked" ] || is_preempted; then
        scontrol requeue "$job" && say "back in the queue"
    elif [ $code = 75 ]; then
        say "stopped by a person: not requeued"
    fi
    exit $code
}

step="" is_interrupted=""
trap stop_step USR1 TERM
PATH=$venv/bin:$PATH
export PATH
# The job ID of an array's last task equals the array's ID, so include the task's number.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
say "job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), ${SLURM_NTASKS:-?} tasks on" \
    "$SLURM_JOB_NODELIST"
choose_srun_mpi

# Replace Slurm's fields (as in --output) in arguments: %j is the job, %A the array, %a the task of
# the array, and %% a percent sign. In URLs, a percent sign before two hexadecimal digits stays.
fill_fields() { # fill_fields WORD: set word to WORD with the values of its fields
    local rest=$1 is_url=""
    word=""
    case $rest in *://*) is_url=yes ;; esac
    while [[ $rest == *%* ]]; do
        word+=${rest%%\%*}
        rest=${rest#*%}
        if [ -n "$is_url" ] && [[ $rest == [0-9A-Fa-f][0-9A-Fa-f]* ]]; then
            word+=%${rest:0:2}
            rest=${rest:2}
            continue
        fi
        case $rest in
        [Aa]*)
            [ -n "${SLURM_ARRAY_JOB_ID:-}" ] ||
                refuse "$1: expected a job array for %A and %a (sbatch --array=0-3), found none"
            ;;
        esac
        case $rest in
        j*) word+=$SLURM_JOB_ID ;;
        A*) word+=$SLURM_ARRAY_JOB_ID ;;
        a*) word+=$SLURM_ARRAY_TASK_ID ;;
        %*) word+=% ;;
        *) word+=%${rest:0:1} ;;
        esac
        rest=${rest:1}
    done
    word+=$rest
}
for argument; do
    shift
    fill_fields "$argument"
    set -- "$@" "$word"
done
