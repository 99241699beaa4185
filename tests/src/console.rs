//! The console blocks of a page, run in order in one shell, and compared with what the page shows.
//!
//! A block begins with ` ```console `. In it `$ ` begins a command, `> ` continues it, as does the
//! line after one that ends in `\`; every other line is output. A line `…` stands for one or more
//! lines of output, `…` within a line for one or more characters. What varies between runs (times,
//! durations, sizes, digests, ports, processes) is compared by its kind, and spaces within a line
//! by their being there. Lines that tell what a command waits for are left out.
//!
//! A command succeeds, unless the page shows a line of it that begins with `error: `: then it
//! fails. What it prints is what the page shows, nothing where the page shows nothing. A command
//! that only looks, such as `oncebox inbox list`, is given again until it prints that, for as long
//! as messages take. Jobs in the background go on, and none of them may end with an error.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

/// How long a command may take, and a look until it shows what the page shows.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For a command to end, a build among them.
    pub command: Duration,
    /// For messages to be where a look shows them, and consumers to be what it shows: one that read
    /// for nothing says so after 60 s, `kafka.idle_after_ms`.
    pub look: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { command: Duration::from_secs(300), look: Duration::from_secs(180) }
    }
}

/// A command of a page with the output that the page shows.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Line of the page in which the command begins, counted from 1.
    pub line: usize,
    /// The command, with its continuations in lines of their own.
    pub command: String,
    /// The lines of output.
    pub output: Vec<String>,
}

/// The commands of the console blocks of a page, in order.
pub fn steps(page: &str) -> Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let (mut is_console, mut is_first, mut is_continued) = (false, false, false);
    for (index, line) in page.lines().enumerate() {
        if line.starts_with("```") {
            (is_console, is_first, is_continued) =
                (!is_console && line == "```console", true, false);
        } else if !is_console {
        } else if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { line: index + 1, command: command.to_owned(), output: Vec::new() });
            (is_first, is_continued) = (false, true);
        } else {
            ensure!(!is_first, "line {}: a console block begins with a command", index + 1);
            let step = steps.last_mut().context("a block begins with a command")?;
            let more = line.strip_prefix("> ").or_else(|| (line == ">").then_some(""));
            match more
                .or_else(|| step.command.ends_with('\\').then_some(line))
                .filter(|_| is_continued)
            {
                Some(more) => step.command.extend(["\n", more]),
                None => {
                    is_continued = false;
                    step.output.push(line.to_owned());
                }
            }
        }
    }
    Ok(steps)
}

/// A line without what varies: each such word is replaced by the name of its kind, other words stay
/// as they are. The indentation stays, other spaces are single ones.
pub fn normal(line: &str) -> String {
    let indentation = &line[..line.len() - line.trim_start().len()];
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut said = Vec::with_capacity(words.len());
    for (index, word) in words.iter().enumerate() {
        let is_measured = words.get(index + 1).is_some_and(|unit| UNITS.contains(&core(unit)));
        said.push(normal_word(word, is_measured));
    }
    format!("{indentation}{}", said.join(" "))
}

/// What a number before it counts that no two runs agree on.
const UNITS: [&str; 7] = ["µs", "ms", "s", "B", "KiB", "MiB", "instructions"];

/// A word without the marks around it.
fn core(word: &str) -> &str {
    word.trim_matches(|c: char| !c.is_alphanumeric())
}

fn normal_word(word: &str, is_measured: bool) -> String {
    let core = core(word);
    let kind = if is_time(core) {
        "TIME"
    } else if is_measured && is_number(core) {
        "NUMBER"
    } else if is_process(core) {
        "PROCESS"
    } else if is_digest(core) {
        "DIGEST"
    } else {
        return without_ports(&without_schemas(word));
    };
    word.replacen(core, kind, 1)
}

fn is_number(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit())
        && word.bytes().all(|byte| byte.is_ascii_digit() || b".,".contains(&byte))
}

/// `2026-11-20`, `18:38:52.011` and both in one word.
fn is_time(word: &str) -> bool {
    let marks = word.bytes().filter(|byte| b"-:".contains(byte)).count();
    let digits = word.bytes().filter(u8::is_ascii_digit).count();
    marks >= 2
        && digits >= 6
        && word.bytes().all(|byte| byte.is_ascii_digit() || b"-:.TZ".contains(&byte))
}

/// The beginning of a digest in hexadecimal digits, or all of it.
fn is_digest(word: &str) -> bool {
    word.len() >= 8
        && word.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// A machine and a process of it: `vm/31192`, `4f1c2ab9d07e/7`. A name has a letter in it, which no
/// number and no date has.
fn is_process(word: &str) -> bool {
    let is_machine = |name: &str| {
        let is_name =
            name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        is_name && name.bytes().any(|byte| byte.is_ascii_alphabetic())
    };
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    word.split_once('/').is_some_and(|(machine, process)| is_machine(machine) && is_digits(process))
}

/// Names of tenants' schemas end in twelve random digits: `t_454ba908646b.stock`.
fn without_schemas(word: &str) -> String {
    let is_schema =
        |text: &str| text.len() >= 12 && text.as_bytes()[..12].iter().all(u8::is_ascii_hexdigit);
    match word
        .split_once("t_")
        .filter(|(_, rest)| rest.is_char_boundary(12.min(rest.len())) && is_schema(rest))
    {
        Some((before, rest)) => format!("{before}SCHEMA{}", &rest[12..]),
        None => word.to_owned(),
    }
}

/// Ports of this machine.
fn without_ports(word: &str) -> String {
    let Some((before, rest)) = word.split_once("127.0.0.1:") else {
        return word.to_owned();
    };
    let after = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    if after.len() == rest.len() {
        word.to_owned()
    } else {
        format!("{before}127.0.0.1:PORT{after}")
    }
}

const GAP: &str = "…";

/// How a line begins by which a command tells what it waits for. How many of them there are is a
/// matter of time.
const WAITING: &str = "waiting for the `oncebox dev` of this folder";

/// Where what was printed is not what is shown, in words; none where it is.
pub fn difference(shown: &[String], said: &[String]) -> Option<String> {
    let [shown, said] = [shown, said].map(|lines| {
        lines.iter().filter(|line| !line.starts_with(WAITING)).cloned().collect::<Vec<_>>()
    });
    let said = with_times_in_order(&shown, said);
    let shown: Vec<String> =
        with_times_in_order(&shown, shown.clone()).iter().map(|line| normal(line)).collect();
    let normal: Vec<String> = said.iter().map(|line| normal(line)).collect();
    if is_like(&shown, &normal) {
        return None;
    }
    let mark = |(index, line): (usize, &String)| {
        let mark =
            if shown.iter().any(|shown| shown.trim() != GAP && is_line_like(shown, &normal[index]))
            {
                ' '
            } else {
                '+'
            };
        format!("{mark} {line}\n")
    };
    let missing = shown
        .iter()
        .filter(|line| line.trim() != GAP && !normal.iter().any(|said| is_line_like(line, said)));
    let missing: String = missing.map(|line| format!("- {line}\n")).collect();
    Some(format!(
        "printed (+ is on no line of the page):\n{}shown and not printed:\n{missing}",
        said.iter().enumerate().map(mark).collect::<String>()
    ))
}

/// The lines, sorted where the page shows rows of one and the same time: these stand in any order.
fn with_times_in_order(shown: &[String], mut lines: Vec<String>) -> Vec<String> {
    let time = |line: &String| -> Option<String> {
        let mut words = line.split_whitespace();
        Some(format!(
            "{} {}",
            words.next().filter(|word| is_time(word))?,
            words.next().filter(|word| is_time(word))?
        ))
    };
    if shown.len() != lines.len() {
        return lines;
    }
    let mut begin = 0;
    for rows in shown.chunk_by(|one, other| time(one).is_some() && time(one) == time(other)) {
        lines[begin..begin + rows.len()].sort_by_key(|line| normal(line));
        begin += rows.len();
    }
    lines
}

/// Whether the lines are those that are shown, gaps filled.
fn is_like(shown: &[String], said: &[String]) -> bool {
    let Some((first, shown)) = shown.split_first() else {
        return said.is_empty();
    };
    if first.trim() == GAP {
        return (1..=said.len()).any(|gap| is_like(shown, &said[gap..]));
    }
    said.split_first().is_some_and(|(line, said)| is_line_like(first, line) && is_like(shown, said))
}

fn is_line_like(shown: &str, said: &str) -> bool {
    let Some((before, after)) = shown.split_once(GAP) else {
        return shown == said;
    };
    let Some(rest) = said.strip_prefix(before) else { return false };
    rest.char_indices()
        .skip(1)
        .map(|(at, _)| at)
        .chain((!rest.is_empty()).then_some(rest.len()))
        .any(|at| is_line_like(after, &rest[at..]))
}

/// Commands that change nothing, so that they can be given again: those that begin so.
const LOOKS: [&str; 11] = [
    "oncebox why ",
    "oncebox inbox list",
    "oncebox inbox show",
    "oncebox inbox stats",
    "oncebox consumer show",
    "oncebox deployments",
    "oncebox hosts",
    "oncebox shadow show",
    "oncebox shadow list",
    "oncebox canary show",
    "psql ",
];

fn only_looks(command: &str) -> bool {
    let is_look = LOOKS.iter().any(|look| command.starts_with(look));
    is_look
        && (!command.starts_with("psql ")
            || command.contains("'select ")
            || command.contains("\"select "))
}

/// What a command printed, and how it ended.
#[derive(Debug, Clone)]
pub struct ShellOutput {
    /// Its exit code, as the shell says it.
    pub code: i32,
    /// What it wrote to standard output and standard error.
    pub lines: Vec<String>,
}

/// A shell, with its folder and its jobs. All of them end with this value.
#[derive(Debug)]
pub struct Session {
    bash: Child,
    answers: Receiver<String>,
    /// Where commands and their output are kept.
    records: PathBuf,
    given: usize,
    code: i32,
    /// Jobs in the background: process, command, and the file of its output.
    jobs: Vec<(String, String, PathBuf)>,
    patience: Patience,
    last: Option<ShellOutput>,
}

impl Session {
    /// A shell in `folder`, which keeps what it is given and what that prints in `records`. The
    /// environment is that of this process but for what belongs to the project, and with these
    /// variables.
    pub fn open(
        folder: &Path,
        records: &Path,
        variables: &[(String, String)],
        patience: Patience,
    ) -> Result<Self> {
        fs::create_dir_all(records)
            .with_context(|| format!("failed to create `{}`", records.display()))?;
        let mut bash = Command::new("bash");
        bash.args(["--noprofile", "--norc"]).current_dir(folder).process_group(0);
        for (name, _) in std::env::vars()
            .filter(|(name, _)| name.starts_with("ONCEBOX_") || name.starts_with("CARGO"))
        {
            if name != "CARGO_HOME" {
                bash.env_remove(name);
            }
        }
        bash.envs(variables.iter().map(|(name, value)| (name, value)));
        let errors = fs::File::create(records.join("bash.err"))
            .context("failed to keep what the shell complains about")?;
        bash.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut bash = bash.spawn().context("failed to start `bash`")?;
        let output = BufReader::new(bash.stdout.take().context("it has an output")?);
        let (sender, answers) = channel();
        thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut session = Self {
            bash,
            answers,
            records: records.to_owned(),
            given: 0,
            code: 0,
            jobs: Vec::new(),
            patience,
            last: None,
        };
        // Its input ends with this process, however that ends, and with the input every job. A job
        // that is ended before it is another program still has the trap.
        session.write("trap 'if [ $BASHPID = $$ ]; then trap \"\" TERM; kill 0; fi' EXIT\n")?;
        Ok(session)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let input = self.bash.stdin.as_mut().context("it has an input")?;
        input.write_all(text.as_bytes()).and_then(|()| input.flush()).context("the shell has ended")
    }

    /// Give the shell a command and wait for its end.
    pub fn run(&mut self, command: &str) -> Result<ShellOutput> {
        self.given += 1;
        let file = self.records.join(format!("{:03}.sh", self.given));
        let output = file.with_extension("out");
        fs::write(&file, format!("{command}\n")).context("failed to write a command down")?;
        // What is sourced sees the code of the command before, and leaves the shell alive when it
        // cannot be read.
        let line = format!(
            "(exit {}); . '{}' </dev/null >'{}' 2>&1; echo \"$? $!\"\n",
            self.code,
            file.display(),
            output.display()
        );
        self.write(&line)?;
        let answer = self.answer(command)?;
        let (code, job) = answer.split_once(' ').context("the shell answers with a code")?;
        self.code = code.parse().with_context(|| format!("the shell answers `{answer}`"))?;
        if !job.is_empty() && self.jobs.iter().all(|(known, _, _)| known != job) {
            self.jobs.push((job.to_owned(), command.to_owned(), output.clone()));
        }
        let text = fs::read(&output).context("failed to read what a command printed")?;
        let said = ShellOutput {
            code: self.code,
            lines: String::from_utf8_lossy(&text).lines().map(str::to_owned).collect(),
        };
        self.last = Some(said.clone());
        Ok(said)
    }

    /// What the last command printed.
    pub fn last(&self) -> Option<&ShellOutput> {
        self.last.as_ref()
    }

    fn answer(&mut self, command: &str) -> Result<String> {
        match self.answers.recv_timeout(self.patience.command) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                bail!("`{command}` does not end within {:?}", self.patience.command)
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the shell ends with `{command}`"),
        }
    }

    /// Run a step of a page; an error where it does not do what the page shows.
    pub fn follow(&mut self, step: &Step) -> Result<ShellOutput> {
        let fails = step.output.iter().any(|line| line.starts_with("error: "));
        let until = Instant::now() + self.patience.look;
        loop {
            let said = self.run(&step.command)?;
            let code = match (said.code, fails) {
                (0, true) => Some("it succeeds, and the page shows an error\n".to_owned()),
                (0, false) | (_, true) => None,
                (code, false) => {
                    Some(format!("it ends with {code}, and the page shows no error\n"))
                }
            };
            let difference = difference(&step.output, &said.lines);
            if code.is_none() && difference.is_none() {
                self.check_jobs()?;
                return Ok(said);
            }
            if !only_looks(&step.command) || Instant::now() > until {
                self.check_jobs()?;
                let code = code.unwrap_or_default();
                let difference = difference.unwrap_or_else(|| said.lines.join("\n"));
                bail!("line {}: $ {}\n{code}{difference}", step.line, step.command);
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// None of the jobs has ended with an error.
    fn check_jobs(&mut self) -> Result<()> {
        for (job, command, output) in self.jobs.clone() {
            self.write(&format!(
                "kill -0 {job} 2>/dev/null && echo 0 || {{ wait {job}; echo $?; }}\n"
            ))?;
            let code = self.answer(&command)?;
            // 143: the page itself ended it.
            if code != "0" && code != "143" {
                bail!(
                    "the job `{command}` has ended with {code}:\n{}",
                    fs::read_to_string(&output).unwrap_or_default()
                );
            }
        }
        Ok(())
    }

    /// End the jobs as a shell's user does, and see that they end well.
    pub fn close(mut self) -> Result<()> {
        self.check_jobs()?;
        for (job, command, output) in std::mem::take(&mut self.jobs) {
            self.write(&format!("kill {job} 2>/dev/null; wait {job} 2>/dev/null; echo $?\n"))?;
            let code = self.answer(&command)?;
            let said = fs::read_to_string(&output).unwrap_or_default();
            ensure!(code == "0" || code == "143", "the job `{command}` ends with {code}:\n{said}");
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.bash.stdin.take());
        let until = Instant::now() + Duration::from_secs(20);
        let group = i32::try_from(self.bash.id()).expect("a process id");
        // SAFETY: plain system calls; the group is of a shell that was started here and is not
        // reaped before.
        let is_there = || unsafe { libc::kill(-group, 0) } == 0;
        while self.bash.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
        if is_there() {
            // SAFETY: as above.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.bash.wait(); // it was killed
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use crate::temp_dir::TempDir;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    const PAGE: &str = "# A page\n\n```console\n$ cat a \\\n    b\none\n> two\n$ for i in 1 2; \
        do\n>   echo $i\n> done\n1\n2\n```\n\n\
        ```\n$ not this\n```\n\n```sh\nnor this\n```\n\n```console\n$ true\n```\n";

    #[test]
    fn commands_and_what_they_print_are_told_apart() {
        let step = |line, command: &str, output: &str| Step {
            line,
            command: command.to_owned(),
            output: lines(output),
        };
        let expected = [
            step(4, "cat a \\\n    b", "one\n> two"),
            step(8, "for i in 1 2; do\n  echo $i\ndone", "1\n2"),
            step(24, "true", ""),
        ];
        assert_eq!(steps(PAGE).unwrap(), expected);
        assert!(steps("```console\noutput\n```\n").unwrap_err().to_string().contains("line 2"));
    }

    #[test]
    fn what_varies_is_the_same_and_nothing_else_is() {
        for (one, other) in [
            ("2026-11-20 18:38:52  dev", "2027-01-02 00:00:01  dev"),
            (
                "  4.0 ms, 1153 KiB of memory, 15753 instructions",
                "  12 ms, 9 KiB of memory, 1 instructions",
            ),
            ("at 127.0.0.1:21940/postgres", "at 127.0.0.1:5432/postgres"),
            ("vm/31192  switched", "other-machine/7       switched"),
            ("vm/31192", "4f1c2ab9d07e/7"),
            ("`ip-10-0-0-5.local/1`", "`0_a/31192`"),
            ("version 74bd456ad6f9, takes", "version 96324fb92049, takes"),
            ("schema `t_454ba908646b`", "schema `t_000000000000`"),
            ("2026-11-22T21:39:04.011Z", "2026-11-22T21:39:04Z"),
        ] {
            assert_eq!(normal(one), normal(other));
        }
        for (one, other) in [
            ("1 message", "2 messages"),
            ("balance 0 → 250", "balance 0 → 251"),
            ("  indented", "indented"),
            ("acme/reservations", "acme/orders"),
            ("10/20", "10/21"),
            ("2026-11/20", "2026-11/21"),
            ("20/11/2026", "21/11/2026"),
            ("10.0.0.0/8", "10.0.0.0/16"),
            ("vm/31192", "vm/31192a"),
            ("version 74bd456ad6f9", "version reserved"),
            ("1 row", "2 row"),
            ("1 of 1 hosts", "0 of 1 hosts"),
            ("2.0 statements", "3.0 statements"),
            ("orders[0]@0", "orders[0]@1"),
            ("deadbee", "deadbef"),
            ("port 127.0.0.1", "port 127.0.0.2"),
        ] {
            assert_ne!(normal(one), normal(other));
        }
    }

    /// What could go wrong: whatever a command prints, the page is right.
    #[test]
    fn a_planted_deviation_is_noticed() {
        let shown = lines("one 1\n…\ntwo … wide, 3 ms\nthree");
        let check = |said: &str| difference(&shown, &lines(said));
        assert_eq!(check("one 1\nany\nany\ntwo metres wide, 9 ms\nthree"), None);
        assert_eq!(check("one   1\nthree\ntwo x wide, 3 ms\nthree"), None);
        for (said, what) in [
            ("one 2\nany\ntwo x wide, 3 ms\nthree", "another word"),
            ("one 1\nany\ntwo x wide, 3 s\nthree", "another unit"),
            ("one 1\nany\ntwo x wide, 3 ms", "a line is missing"),
            ("one 1\ntwo x wide, 3 ms\nthree", "nothing where lines are left out"),
            ("one 1\nany\ntwo x wide, 3 ms\nthree\nfour", "a line too many"),
            ("zero\none 1\nany\ntwo x wide, 3 ms\nthree", "a line too many in front"),
            ("one 1\nany\ntwo x wide, 3 ms\nmore\nthree", "a line too many between"),
            ("one 1\nany\ntwo  wide, 3 ms\nthree", "nothing where text is left out"),
            ("one 1\nany\nthree\ntwo x wide, 3 ms", "another order"),
            ("", "nothing at all"),
        ] {
            assert!(check(said).is_some(), "{what}");
        }
        assert_eq!(
            check(
                "waiting for the `oncebox dev` of this folder\none 1\nany\ntwo x wide, 3 ms\nthree"
            ),
            None
        );
        assert!(
            check("waiting for nothing\none 1\nany\ntwo x wide, 3 ms\nthree").is_some(),
            "another wait"
        );
        assert_eq!(difference(&[], &[]), None);
        assert!(difference(&[], &lines("said")).is_some(), "it prints, and the page shows nothing");
        let rows = lines("ID\n2026-11-20 18:38:52 a\n2026-11-20 18:38:52 b\n2026-11-20 18:38:51 c");
        let check_rows = |said: &str| difference(&rows, &lines(said)).is_none();
        assert!(check_rows(
            "ID\n2027-01-01 00:00:02 b\n2027-01-01 00:00:01 a\n2027-01-01 00:00:01 c"
        ));
        assert!(
            !check_rows("ID\n2027-01-01 00:00:02 c\n2027-01-01 00:00:01 a\n2027-01-01 00:00:01 b"),
            "another time"
        );
        assert!(
            !check_rows("ID\n2027-01-01 00:00:02 b\n2027-01-01 00:00:01 b\n2027-01-01 00:00:01 c"),
            "twice the same"
        );
        let told = check("one 1\nany\ntwo x wide, 3 ms\nfour").expect("a difference");
        assert!(told.contains("+ four\n") && told.contains("- three\n"), "{told}");
    }

    /// The error with which a page ends.
    fn follow(page: &str) -> Result<()> {
        let folder = TempDir::new("console");
        fs::create_dir_all(folder.path())?;
        let patience = Patience { command: Duration::from_secs(60), look: Duration::from_secs(30) };
        let mut session =
            Session::open(folder.path(), &folder.path().join("records"), &[], patience)?;
        for step in steps(&format!("```console\n{page}\n```\n"))? {
            session.follow(&step)?;
        }
        session.close()
    }

    #[test]
    fn commands_run_in_one_shell() {
        follow(
            "$ cd records && export A=1 && b=2\n$ echo $A $b ${PWD##*/}\n1 2 records\n$ cat \
            <<END\n> x $A\n> END\nx 1",
        )
        .unwrap();
        follow("$ sleep 60 &\n$ kill %1").unwrap();
        follow("$ sleep 60 &").unwrap();
        follow(
            "$ echo 'error: no' >&2; exit_code() { return 3; }; exit_code\nerror: no\n$ echo $?\n3",
        )
        .unwrap();
        follow("$ cat").unwrap();
    }

    #[test]
    fn a_step_that_fails_is_noticed() {
        for (page, what) in [
            ("$ false", "ends with 1"),
            ("$ echo 'error: no'\nerror: no", "it succeeds"),
            ("$ no-such-program\nerror: no", "no-such-program"),
            ("$ echo 'unfinished", "ends with"),
            ("$ echo more", "+ more"),
            ("$ true\nmore", "- more"),
            ("$ echo a\n$ echo a\nb", "line 2"),
            ("$ exit 0", "the shell ends"),
            ("$ (sleep 0.2; echo why; exit 7) &\n$ sleep 3", "has ended with 7:\nwhy"),
            (
                "$ (trap 'echo why; exit 7' TERM; touch up; while :; do sleep 0.05; done) &\n$ \
                    until [ -e up ]; do sleep 0.05; done",
                "ends with 7:\nwhy",
            ),
        ] {
            let error = follow(page).expect_err(what).to_string();
            assert!(error.contains(what), "{page}: {error}");
        }
    }

    /// A look is given again; whatever changes something is not.
    #[test]
    fn only_a_look_is_repeated() {
        let looked = "oncebox() { echo x >> n; wc -l < n; }";
        follow(&format!("$ {looked}\n$ oncebox inbox list\n3")).unwrap();
        assert!(follow(&format!("$ {looked}\n$ oncebox inbox redrive\n3")).is_err());
        assert!(
            only_looks("psql -c 'select 1'") && !only_looks("psql -c 'insert into t select 1'")
        );
    }
}
