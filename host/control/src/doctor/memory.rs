//! Limits on the memory that a query may take of the server. PostgreSQL has no such limit, and SQL
//! cannot see that of the system. So only a server on this machine can be checked.

use std::{fs, path::Path};

use super::{Finding, Look, Severity};

const CHECK: &str = "memory";

const ADVICE: &str = "one query of a tenant can take all memory of the server, and the kernel then \
    ends every session of every tenant: start the \
    server with a limit on its address space (`LimitAS=` of its unit; shared_buffers and 1.5 GB \
    are enough for most), so that the query fails alone; \
    a memory cgroup keeps at least the rest of the machine. A managed server has a limit by its \
    size, and restarts at it";

impl Look<'_> {
    /// Checks that the memory of the server's processes is bounded, where the limit can be seen.
    pub(super) async fn memory_is_bounded(&self) -> Vec<Finding> {
        let pid: i32 =
            match sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&self.pool).await {
                Ok(pid) => pid,
                Err(error) => return vec![self.unknown(CHECK, &error)],
            };
        if !self.is_here(pid) {
            let found = "the server does not run on this machine, or hides its processes; a limit \
                on its memory cannot be seen from here";
            return vec![self.finding(CHECK, Severity::Unknown, found).advise(ADVICE)];
        }
        let megabytes = |bytes: u64| bytes >> 20;
        vec![match (address_space(pid), cgroup(pid)) {
            (Some(bytes), _) => self.finding(
                CHECK,
                Severity::Ok,
                format!(
                    "a session of the server may take {} MiB of address space",
                    megabytes(bytes)
                ),
            ),
            (None, Some(bytes)) => {
                let found = format!(
                    "the server's cgroup may take {} MiB, but a single session all of it, and what \
                        exceeds it ends them all",
                    megabytes(bytes)
                );
                self.finding(CHECK, Severity::Warning, found).advise(ADVICE)
            }
            (None, None) => self
                .finding(CHECK, Severity::Error, "nothing bounds the memory of the server")
                .advise(ADVICE),
        }]
    }

    /// Returns whether this process id is a session of the server on this machine, and not another
    /// process.
    fn is_here(&self, pid: i32) -> bool {
        let host = self.options.get_host();
        let is_local = self.options.get_socket().is_some()
            || host.starts_with('/')
            || ["localhost", "127.0.0.1", "::1"].contains(&host);
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_local && command.starts_with(b"postgres")
    }
}

/// Returns `RLIMIT_AS` of a process, in bytes, if it is limited.
fn address_space(pid: i32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the smallest `memory.max`, in bytes, of the process' cgroup and of those around it, if
/// any is set.
fn cgroup(pid: i32) -> Option<u64> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let around = Path::new(group)
        .ancestors()
        .map(|dir| Path::new("/sys/fs/cgroup").join(dir).join("memory.max"));
    around.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()).min()
}
