-- Whoever compiles a component keeps a session open for it, and names it here. When the process ends, however it ends,
-- the session does, and the component is free for the next one at once. Without a name it is a host from before this,
-- whose silence of 30 seconds says the same.
ALTER TABLE oncebox.component
    ADD COLUMN session_pid       int,
    -- A process id is given again; together with this it is not.
    ADD COLUMN session_began_at  timestamptz;
