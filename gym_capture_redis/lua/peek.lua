-- Says which attempt of the rollout there is, and whether it holds anything.
-- Reply    OK, 1 if it holds an entry, a mark or an intent, else 0 | ABSENT
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state then return reply('ABSENT', nil) end
return reply('OK', state, holds(state))
