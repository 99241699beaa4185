//! A PostgreSQL for the tests of this process, from the server's binaries on this machine.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

use postgres::Config;

/// Makes a cluster in a folder of its own, says where, and removes it when standard input
/// ends, which it does when the tests do, however they end.
const SCRIPT: &str = r#"
set -eu
bin=$0
server=
dir=$(mktemp -d /tmp/oncebox-test-XXXXXX)
end() {
    if [ -n "$server" ]; then kill -INT "$server" && wait "$server" || true; fi
    rm -rf "$dir"
}
trap end EXIT
trap '' INT PIPE
trap 'exit 1' HUP TERM
"$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --locale=C -N >"$dir/log" 2>&1 ||
    { cat "$dir/log" >&2; exit 1; }
"$bin/postgres" -D "$dir/data" -k "$dir" -c listen_addresses= -c fsync=off \
    -c max_connections=200 >"$dir/log" 2>&1 &
server=$!
tries=0
until "$bin/pg_isready" -q -h "$dir"; do
    tries=$((tries + 1))
    if [ $tries -gt 600 ] || ! kill -0 "$server"; then cat "$dir/log" >&2; exit 1; fi
    sleep 0.05
done
echo "$dir"
cat >/dev/null
"#;

/// A server that ends with this process.
struct Server {
    dir: String,
    /// Holds the script's standard input.
    _script: Child,
}

/// How to reach this process's server, which the first caller starts, or why there is none.
pub(super) fn config() -> Result<Config, String> {
    static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
    let server = SERVER.get_or_init(start).as_ref()?;
    let mut config = Config::new();
    config
        .host_path(&server.dir)
        .user("postgres")
        .dbname("postgres");
    Ok(config)
}

fn start() -> Result<Server, String> {
    let binaries = binaries().ok_or("no PostgreSQL server is installed")?;
    let mut command = as_who_may_run_it()?;
    command
        .args(["sh", "-c", SCRIPT])
        .arg(binaries)
        .current_dir("/");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut script = command
        .spawn()
        .map_err(|error| format!("cannot start a shell: {error}"))?;
    let mut dir = String::new();
    if let Some(output) = script.stdout.take() {
        // An end without a line is told by the empty `dir`.
        let _ = BufReader::new(output).read_line(&mut dir);
    }
    match dir.trim_end() {
        "" => Err(format!(
            "a private PostgreSQL did not start: {}",
            last_words(&mut script)
        )),
        dir => Ok(Server {
            dir: dir.to_owned(),
            _script: script,
        }),
    }
}

fn last_words(script: &mut Child) -> String {
    let mut text = String::new();
    if let Some(errors) = &mut script.stderr {
        let _ = errors.read_to_string(&mut text);
    }
    text.trim_end().to_owned()
}

/// PostgreSQL refuses to run as root, so root lends it to another user.
fn as_who_may_run_it() -> Result<Command, String> {
    if !is_root() {
        return Ok(Command::new("env"));
    }
    let known = |user: &&str| {
        let id = Command::new("id").arg(user).output();
        id.is_ok_and(|id| id.status.success())
    };
    let user = ["postgres", "nobody"].into_iter().find(known);
    let user =
        user.ok_or("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`")?;
    let mut command = Command::new("runuser");
    command.args(["-u", user, "--"]);
    Ok(command)
}

fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// The folder with `initdb` and `postgres`: on the path, else the newest where systems keep it.
fn binaries() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
    for parent in ["/usr/lib/postgresql", "/opt/homebrew/opt", "/usr/local/opt"] {
        folders.extend(
            versions(Path::new(parent))
                .into_iter()
                .map(|version| version.join("bin")),
        );
    }
    let is_whole = |folder: &PathBuf| {
        ["initdb", "postgres", "pg_isready"]
            .iter()
            .all(|name| folder.join(name).is_file())
    };
    folders.into_iter().find(is_whole)
}

/// Folders of PostgreSQL, such as `15` and `postgresql@17`, the newest first.
fn versions(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let version = |path: &PathBuf| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix("postgresql@")
            .unwrap_or(name)
            .parse()
            .ok()
    };
    let mut folders: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| version(path).is_some())
        .collect();
    folders.sort_by_key(|path| std::cmp::Reverse(version(path)));
    folders
}
