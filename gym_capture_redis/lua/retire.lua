-- Retires an attempt without asking for its snapshot; a tombstone stays, for an unknown rollout too.
-- 1  incarnation of the attempt that is meant, or '' for none
-- 2  incarnation to give the tombstone of an unknown rollout, without the time that follows it
-- 3  seconds that the tombstone stays
-- Reply    OK, 1 if it held an entry, a mark or an intent, else 0 |
--          CHANGED (there is another attempt by now; nothing changed)
-- Repeat   safe: OK
local state, err = load_state()
if err then return err end
if not state then
  if arg(1) ~= '' then return reply('CHANGED', nil) end
  state = new_state(arg(2))
elseif state.incarnation ~= arg(1) and string.sub(state.incarnation, 1, #arg(2)) ~= arg(2) then
  return reply('CHANGED', state)
end
local held = holds(state)
if state.status ~= 'retired' then retire(state, arg(3)) end
return reply('OK', state, held)
