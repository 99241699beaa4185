# Sourced by check.sh and test.sh: names each step, and says at the end how long each took.
steps=() began=$SECONDS
step() {
    step_ended
    steps+=("$*")
    began=$SECONDS
    printf '\n== %s\n' "$*"
}
step_ended() {
    if ((${#steps[@]})); then steps[-1]=$(printf '%5d s  %s' $((SECONDS - began)) "${steps[-1]}"); fi
}
steps_done() {
    step_ended
    printf '\n== all green\n'
    printf '%s\n' "${steps[@]}"
}
