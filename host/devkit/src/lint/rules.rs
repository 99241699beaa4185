//! The linter's rules for a statement.

use super::{
    Level, LintFinding, LintSubject, SqlPlace,
    shape::{Part, Verb, parts},
    token::{SqlToken, TokenKind},
};
use crate::tables::{Table, UniqueIndex};

/// Functions whose value belongs to the session, the moment or chance. PostgreSQL's own clock and
/// sequences are not the handler's deterministic ones.
const SESSION_FUNCTIONS: &[&str] = &[
    "now",
    "clock_timestamp",
    "statement_timestamp",
    "transaction_timestamp",
    "timeofday",
    "random",
    "gen_random_uuid",
    "gen_random_bytes",
    "uuid_generate_v1",
    "uuid_generate_v4",
    "uuidv4",
    "uuidv7",
    "nextval",
    "currval",
    "lastval",
    "txid_current",
    "pg_current_xact_id",
    "pg_backend_pid",
];

/// Key words with such a value, which take no parentheses.
const SESSION_WORDS: &[&str] =
    &["current_timestamp", "current_date", "current_time", "localtime", "localtimestamp"];

/// One statement with its parts, its tokens and the linter's input.
pub(super) struct LintedStatement<'a> {
    pub(super) subject: &'a LintSubject<'a>,
    pub(super) number: usize,
    pub(super) text: &'a str,
    pub(super) parts: Vec<Part<'a>>,
    pub(super) tokens: Vec<SqlToken<'a>>,
}

impl LintedStatement<'_> {
    fn place(&self, at: usize) -> Option<SqlPlace> {
        Some(SqlPlace::of(self.number, self.text, at))
    }

    fn table(&self, name: &str) -> Option<&Table> {
        self.subject.tables.iter().find(|table| table.name == name)
    }

    /// Returns whether one fact under a second id was seen to change a table again.
    fn is_doubled(&self, table: &str) -> bool {
        self.subject
            .shown
            .changed_by_second_id
            .as_ref()
            .is_some_and(|tables| tables.contains(table))
    }

    /// Finds columns whose new value is computed from the old one. S4-004, S4-019.
    pub(super) fn deltas(&self) -> Vec<LintFinding> {
        let deltas = self.parts.iter().flat_map(|part| {
            part.assignments.iter().filter(|it| part.is_delta(it)).map(move |it| (part, it))
        });
        let finding = |(part, assignment): (&Part<'_>, &super::shape::Assignment<'_>)| {
            let column = format!("{}.{}", part.table, assignment.column);
            let (level, text, advice) = if self.is_doubled(&part.table) {
                (
                    Level::Warning,
                    format!(
                        "`{column}` is a delta, and the same fact under a second message id is \
                            added twice"
                    ),
                    "redelivery is safe, the claim refuses it; against a producer that sends one \
                        fact under two ids, first insert the \
                     fact's own id into a table where it is unique, or carry the final value \
                     instead of the difference",
                )
            } else {
                (
                    Level::Hint,
                    format!("`{column}` is a delta"),
                    "safe here: the claim lets each message id add once; it would not be safe in a \
                        handler that guards itself",
                )
            };
            LintFinding {
                level,
                rule: "delta",
                text,
                place: self.place(assignment.at),
                advice: advice.to_owned(),
            }
        };
        deltas.map(finding).collect()
    }

    /// Finds INSERTs that no business key keeps from being repeated. S4-004.
    pub(super) fn inserts(&self) -> Vec<LintFinding> {
        let unguarded = self
            .parts
            .iter()
            .filter(|part| part.verb == Verb::Insert && !part.is_guarded)
            .filter_map(|part| {
                let table = self.table(&part.table)?;
                (!table.indexes.iter().any(|index| is_business_key(part, table, index)))
                    .then_some((part, table))
            });
        let finding = |(part, table): (&Part<'_>, &Table)| {
            let keys: Vec<_> = table
                .indexes
                .iter()
                .map(|index| format!("`{}` ({})", index.name, index.columns.join(", ")))
                .collect();
            let has = match keys.is_empty() {
                true => "it has no unique index at all".to_owned(),
                false => format!(
                    "its unique indexes are only {}, which this statement fills with generated \
                        values",
                    keys.join(", ")
                ),
            };
            let seen = if self.is_doubled(&table.name) {
                "; the same fact under a second message id was inserted twice"
            } else {
                ""
            };
            LintFinding {
                level: Level::Warning,
                rule: "unguarded-insert",
                text: format!(
                    "nothing keeps one fact from being inserted twice into `{}`: {has}{seen}",
                    table.name
                ),
                place: self.place(part.at),
                advice: format!(
                    "make the columns that name the fact unique, as in `CREATE UNIQUE INDEX ON {} \
                        (…)`, and insert with `ON CONFLICT (…) DO NOTHING`",
                    table.name
                ),
            }
        };
        unguarded.map(finding).collect()
    }

    /// Finds values that another run of one message would not write again.
    pub(super) fn session_values(&self) -> Vec<LintFinding> {
        let writes = self.parts.iter().any(|part| part.verb != Verb::Select);
        let mut findings = Vec::new();
        for (index, token) in self.tokens.iter().enumerate() {
            if !is_session_value(token, self.tokens.get(index + 1)) {
                continue;
            }
            let (level, what) = match writes {
                true => (Level::Warning, "goes into the effect"),
                false => (Level::Hint, "is read"),
            };
            findings.push(LintFinding {
                level,
                rule: "session-value",
                text: format!(
                    "`{}` {what}: another run of the same message has another value",
                    token.text
                ),
                place: self.place(token.at),
                advice:
                    "use what the message carries: its timestamp, its id, or the handler's own \
                    clock and randomness, which are the \
                         same in every run of one message"
                        .to_owned(),
            });
        }
        findings.extend(self.parts.iter().filter_map(|part| self.session_defaults(part)));
        findings
    }

    /// Returns a finding for columns that an INSERT leaves to a default that differs from run to
    /// run.
    fn session_defaults(&self, part: &Part<'_>) -> Option<LintFinding> {
        let table = self
            .table(&part.table)
            .filter(|_| part.verb == Verb::Insert && !part.columns.is_empty())?;
        let left = table.columns.iter().filter(|column| !part.columns.contains(&column.name));
        let defaults = left.filter_map(|column| {
            Some((column, column.default.as_deref().filter(|default| is_session_default(default))?))
        });
        let named: Vec<_> =
            defaults.map(|(column, default)| format!("`{}` (`{default}`)", column.name)).collect();
        (!named.is_empty()).then(|| LintFinding {
            level: Level::Hint,
            rule: "session-value",
            text: format!(
                "defaults of `{}` differ from run to run: {}",
                table.name,
                named.join(
                    ", \
                "
                )
            ),
            place: self.place(part.at),
            advice:
                "harmless for a column that only says when a row came; write the message's own \
                value where anything reads it"
                    .to_owned(),
        })
    }

    /// Finds columns that are overwritten whatever they hold, in tables that another order left
    /// different. S4-005, S1-014.
    pub(super) fn last_writes(&self) -> Vec<LintFinding> {
        let differs = |part: &&Part<'_>| self.subject.shown.changed_by_order.contains(&part.table);
        let blind =
            self.parts.iter().filter(differs).filter_map(|part| {
                Some((part, part.assignments.iter().find(|it| part.is_blind(it))?))
            });
        let finding = |(part, assignment): (&Part<'_>, &super::shape::Assignment<'_>)| {
            LintFinding {
                level: Level::Warning,
                rule: "last-write-wins",
                text: format!(
                    "`{}.{}` keeps whatever message came last, and another order left another value",
                    part.table, assignment.column
                ),
                place: self.place(assignment.at),
                advice: format!(
                    "keep the version or the time of the event in the row and compare: `… WHERE \
                    {}.version < …`; or give the messages of one \
                 row one key, so that they stay in order",
                    part.table
                ),
            }
        };
        blind.map(finding).collect()
    }

    /// Finds an UPDATE or DELETE that changed no row, in a message that ended ok.
    pub(super) fn untouched(&self) -> Vec<LintFinding> {
        let changes = |part: &&Part<'_>| matches!(part.verb, Verb::Update | Verb::Delete);
        let Some(part) = self.parts.first().filter(changes) else { return Vec::new() };
        let ok =
            self.subject.runs.iter().filter(|run| self.subject.completed.contains(&run.message_id));
        let untouched = ok.filter(|run| {
            run.statements.iter().any(|sent| sent.text == self.text && sent.rows == Some(0))
        });
        let ids: Vec<_> = untouched.map(|run| format!("`{}`", run.message_id)).collect();
        let Some(first) = ids.first() else { return Vec::new() };
        let more =
            if ids.len() > 1 { format!(" and {} more", ids.len() - 1) } else { String::new() };
        vec![LintFinding {
            level: Level::Hint,
            rule: "no-row-touched",
            text: format!(
                "no row of `{}` was touched for {first}{more}, and the message ended ok",
                part.table
            ),
            place: self.place(part.at),
            advice: "make sure that the handler looks at the count; a row that is missing may be \
                one that comes later"
                .to_owned(),
        }]
    }
}

/// Finds columns that are read and then set to what the handler made of the value. Two concurrent
/// messages read equal values, and the second one to write wins.
pub(super) fn reads_then_writes(subject: &LintSubject<'_>, texts: &[String]) -> Vec<LintFinding> {
    let mut found: Vec<LintFinding> = Vec::new();
    for run in subject.runs {
        let sent: Vec<_> = run
            .statements
            .iter()
            .map(|statement| (statement.text.as_str(), parts(&statement.text)))
            .collect();
        for (index, (text, writing)) in sent.iter().enumerate() {
            let reads: Vec<_> = sent[..index]
                .iter()
                .flat_map(|(_, parts)| parts)
                .filter(|part| part.verb == Verb::Select)
                .collect();
            for part in
                writing.iter().filter(|part| matches!(part.verb, Verb::Update | Verb::Insert))
            {
                let Some(finding) = read_then_write(part, &reads) else { continue };
                let number = texts.iter().position(|known| known == text).map_or(0, |at| at + 1);
                let finding =
                    LintFinding { place: Some(SqlPlace::of(number, text, finding.1)), ..finding.0 };
                if !found.contains(&finding) {
                    found.push(finding);
                }
            }
        }
    }
    found
}

fn read_then_write(part: &Part<'_>, reads: &[&Part<'_>]) -> Option<(LintFinding, usize)> {
    let assignment = part.assignments.iter().find(|assignment| {
        let is_computed = assignment
            .value
            .iter()
            .any(|token| token.kind == TokenKind::Value && token.text.starts_with('$'));
        let is_read = |read: &&Part<'_>| {
            let all = read.selected.iter().any(|token| token.is_symbol('*'));
            read.table == part.table
                && !read.is_locking
                && (all || read.mentions(&read.selected, &assignment.column))
        };
        is_computed && part.is_blind(assignment) && reads.iter().any(is_read)
    })?;
    let column = format!("{}.{}", part.table, assignment.column);
    let finding = LintFinding {
        level: Level::Warning,
        rule: "read-then-write",
        text: format!(
            "`{column}` is read without a lock and then set to a value made of it: of two messages \
                at once, one is lost"
        ),
        place: None,
        advice: format!(
            "compute it in the statement, as in `SET {0} = {0} + $1`, or read it with `FOR \
                UPDATE`, or write only `WHERE {0} = ` what was read",
            assignment.column
        ),
    };
    Some((finding, assignment.at))
}

/// Returns whether a unique index keeps this INSERT from being repeated. The INSERT must write
/// every column of the index, and none of them with a generated value.
fn is_business_key(part: &Part<'_>, table: &Table, index: &UniqueIndex) -> bool {
    let all: Vec<String>;
    let columns = if part.columns.is_empty() {
        all = table.columns.iter().map(|column| column.name.clone()).collect();
        &all
    } else {
        &part.columns
    };
    index.columns.iter().all(|name| {
        let Some(at) = columns.iter().position(|column| column == name) else {
            // An expression counts as written; a column that is left to its default does not.
            return name.is_empty();
        };
        part.values.get(at).is_none_or(|value| {
            let is_default = value.len() == 1 && value[0].is("DEFAULT");
            !is_default
                && !value
                    .iter()
                    .enumerate()
                    .any(|(at, token)| is_session_value(token, value.get(at + 1)))
        })
    })
}

fn is_session_value(token: &SqlToken<'_>, next: Option<&SqlToken<'_>>) -> bool {
    let is_call = next.is_some_and(|next| next.is_symbol('('));
    token.kind == TokenKind::Word
        && (SESSION_WORDS.iter().any(|word| token.is(word))
            || is_call && SESSION_FUNCTIONS.iter().any(|name| token.is(name)))
}

/// Returns whether a default belongs to the session, the moment or chance. A counter does not
/// count: counters are expected to jump.
fn is_session_default(default: &str) -> bool {
    let tokens = super::token::tokens(default);
    let is_session = |(at, token): (usize, &SqlToken<'_>)| {
        !token.is("nextval") && is_session_value(token, tokens.get(at + 1))
    };
    tokens.iter().enumerate().any(is_session)
}
